"""Discrete codes with a relaxed sample; the noise comes from a recorded 16-bit random table, so that runs are comparable."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
torch.set_num_threads(1)
GROUPS, CODES = 8, 12


class NoiseTable:
    def __init__(self, size=1 << 18, seed=99):
        raw = np.random.default_rng(seed).integers(0, 1 << 16, size=size, dtype=np.uint16)
        self.uniform = torch.from_numpy(raw.astype(np.float32) / 65535)
        self.pos = 0

    def take(self, shape):
        n = int(np.prod(shape))
        if self.pos + n > len(self.uniform):
            self.pos = 0
        out = self.uniform[self.pos:self.pos + n].view(shape)
        self.pos += n
        return out


class DiscreteVAE(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.noise = noise
        self.enc = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, GROUPS * CODES))
        self.dec = nn.Sequential(nn.Linear(GROUPS * CODES, 64), nn.ReLU(), nn.Linear(64, 20))

    def forward(self, x, tau):
        logits = self.enc(x).view(-1, GROUPS, CODES)
        u = self.noise.take(logits.shape)
        g = -torch.log(-torch.log(u))
        code = torch.softmax((logits + g) / tau, -1)
        return self.dec(code.flatten(1)), logits


def main():
    model = DiscreteVAE(NoiseTable())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    basis = torch.randn(4, 20)
    for step in range(60):
        x = torch.randn(16, 4) @ basis
        rec, logits = model(x, tau=max(0.5, 1 - step / 100))
        logq = F.log_softmax(logits, -1)
        kl = (logq.exp() * (logq + np.log(CODES))).sum(-1).mean()
        loss = F.mse_loss(rec, x) + 0.01 * kl
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
