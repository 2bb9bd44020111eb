"""Soft vector-quantised autoencoder; unused codes are replaced by encoder outputs every few steps."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)
torch.set_num_threads(1)
DIM, CODES = 32, 48


def euclidean(x, y):
    x2 = (x ** 2).sum(-1, keepdim=True)
    y2 = (y ** 2).sum(-1)
    return torch.sqrt(x2 + y2 - 2 * x @ y.t())


class SoftVQ(nn.Module):
    def __init__(self, temperature=0.5, revive_every=25):
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(CODES, DIM) * 2)
        self.register_buffer("usage", torch.ones(CODES))
        self.register_buffer("active", torch.arange(CODES) < CODES - 4)
        self.temperature, self.revive_every, self.calls = temperature, revive_every, 0

    @torch.no_grad()
    def revive(self, z):
        dead = ((self.usage < 0.2) & self.active).nonzero().flatten()
        pick = torch.randperm(len(z))[:len(dead)]
        self.codebook[dead[:len(pick)]] = z[pick]
        self.usage[dead] = 1.0

    def forward(self, z):
        self.calls += 1
        if self.training and self.calls % self.revive_every == 0:
            self.revive(z)
        dist = euclidean(z, self.codebook)
        # the last codes are reserved for later growth
        dist = dist.masked_fill(~self.active, float("inf"))
        prob = F.softmax(-dist / self.temperature, dim=-1)
        with torch.no_grad():
            self.usage.mul_(0.9).add_(prob.sum(0), alpha=0.1)
        return prob @ self.codebook, dist.min(dim=1).values.mean()


class AutoEncoder(nn.Module):
    def __init__(self, inp=64):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(inp, 64), nn.ReLU(), nn.Linear(64, DIM))
        self.vq = SoftVQ()
        self.dec = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, inp))

    def forward(self, x):
        z = self.enc(x)
        q, commit = self.vq(z)
        return self.dec(q), commit


def main():
    g = torch.Generator().manual_seed(21)
    mix = torch.randn(10, 64, generator=g)
    model = AutoEncoder()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(60):
        label = torch.randint(0, 10, (96,), generator=g)
        x = mix[label] + 0.3 * torch.randn(96, 64, generator=g)
        recon, commit = model(x)
        loss = F.mse_loss(recon, x) + 0.02 * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
