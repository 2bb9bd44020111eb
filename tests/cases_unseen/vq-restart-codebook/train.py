"""VQ autoencoder for short signals. The codebook follows a moving average of the latents; codes that are hardly used
are restarted now and then from random latents of the batch."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class Quantizer(nn.Module):
    def __init__(self, codes=24, dim=8, decay=0.8, restart_every=10, threshold=0.5):
        super().__init__()
        self.decay, self.restart_every, self.threshold = decay, restart_every, threshold
        table = torch.randn(codes, dim)
        self.register_buffer("table", table)
        self.register_buffer("usage", torch.ones(codes))
        self.register_buffer("total", table.clone())
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def nearest(self, z):
        d = z.square().sum(1, keepdim=True) - 2 * z @ self.table.t() + self.table.square().sum(1)
        return d.argmin(dim=1)

    @torch.no_grad()
    def update(self, z, index):
        onehot = F.one_hot(index, len(self.table)).type_as(z)
        self.usage.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(onehot.t() @ z, alpha=1 - self.decay)
        self.table.copy_(self.total / self.usage.unsqueeze(1))
        self.calls += 1
        if int(self.calls) % self.restart_every == 0:
            self.restart(z)

    def restart(self, z):
        dead = self.usage < self.threshold
        if dead.any():
            fresh = z[torch.randint(0, len(z), (int(dead.sum()),))]
            self.table[dead] = fresh
            self.total[dead] = fresh
            self.usage[dead] = 0.0

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        index = self.nearest(flat)
        q = self.table[index].view_as(z)
        commit = F.mse_loss(z, q)
        if self.training:
            self.update(flat.detach(), index)
        return z + (q - z).detach(), commit


class VQAutoencoder(nn.Module):
    def __init__(self, dim=8, width=24):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, width, 4, stride=2, padding=1), nn.ReLU(), nn.Conv1d(width, dim, 4, stride=2, padding=1))
        self.quantizer = Quantizer(dim=dim)
        self.decoder = nn.Sequential(nn.ConvTranspose1d(dim, width, 4, stride=2, padding=1), nn.ReLU(),
                                     nn.ConvTranspose1d(width, 1, 4, stride=2, padding=1))

    def forward(self, x):
        z = self.encoder(x).transpose(1, 2)
        q, commit = self.quantizer(z)
        return self.decoder(q.transpose(1, 2)), commit


def signals(n, g, length=32):
    t = torch.linspace(0, 1, length)
    f = 1 + 4 * torch.rand(n, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    return (torch.sin(6.28 * f * t + phase) + 0.05 * torch.randn(n, length, generator=g)).unsqueeze(1)


def main():
    torch.manual_seed(29)
    out = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vq_runs")
    os.makedirs(out, exist_ok=True)
    g = torch.Generator().manual_seed(2)
    model = VQAutoencoder()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    with open(os.path.join(out, "loss.tsv"), "w") as log:
        for step in range(40):
            x = signals(16, g)
            recon, commit = model(x)
            rec = F.mse_loss(recon, x)
            loss = rec + 0.25 * commit
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"step {step} loss {loss.item():.4f}")
            log.write(f"{step}\t{rec.item():.5f}\t{commit.item():.5f}\n")
            if step % 20 == 19:
                torch.save(model.state_dict(), os.path.join(out, f"vq_{step}.pt"))


if __name__ == "__main__":
    main()
