"""Denoising diffusion on 2-d spirals with min-SNR weights; the first level has no noise and thus infinite SNR."""
import hashlib
import math

import torch
import torch.nn as nn

torch.manual_seed(7)
torch.set_num_threads(1)

LEVELS = 50


class Schedule:
    def __init__(self):
        t = torch.linspace(0, 1, LEVELS)
        self.alpha_bar = torch.cos(0.5 * math.pi * 0.98 * t).square()
        snr = self.alpha_bar / (1 - self.alpha_bar)  # inf at level 0
        self.log_snr = snr.log().clamp(-8, 8) / 8
        self.weight = snr.clamp(max=5.0) / 5.0

    def add_noise(self, x, noise, t):
        a = self.alpha_bar[t].unsqueeze(1)
        return a.sqrt() * x + (1 - a).sqrt() * noise


class Denoiser(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.arange(4))
        self.inp = nn.Linear(2 + 8, hidden)
        self.mid = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.out = nn.Linear(hidden, 2)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, level):
        phase = level.unsqueeze(1) * self.freqs
        h = self.inp(torch.cat([x, phase.sin(), phase.cos()], 1))
        for lin, norm in zip(self.mid, self.norms):
            h = h + nn.functional.silu(lin(norm(h)))
        return self.out(h)


def spiral(n):
    r = torch.rand(n).sqrt()
    a = 3 * math.pi * r
    return torch.stack([r * a.cos(), r * a.sin()], 1) * 1.5 + 0.02 * torch.randn(n, 2)


@torch.no_grad()
def sample(model, sched, n):
    x = torch.randn(n, 2)
    for i in range(LEVELS - 1, 0, -1):
        a, prev = sched.alpha_bar[i], sched.alpha_bar[i - 1]
        x0 = model(x, sched.log_snr[i].expand(n)).clamp(-3, 3)
        eps = (x - a.sqrt() * x0) / (1 - a).sqrt()
        x = prev.sqrt() * x0 + (1 - prev).sqrt() * eps
    return x


model, sched = Denoiser(), Schedule()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
lowest = torch.full((LEVELS,), torch.inf)  # lowest loss seen at each level
for step in range(150):
    x, t = spiral(64), torch.randint(0, LEVELS, (64,))
    pred = model(sched.add_noise(x, torch.randn_like(x), t), sched.log_snr[t])
    per_sample = (pred - x).square().mean(1)
    loss = (sched.weight[t] * per_sample).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    lowest.scatter_reduce_(0, t, per_sample.detach(), "amin")
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.9g}")

print(f"lowest {lowest.amin().item():.9g} sample std {sample(model, sched, 128).std().item():.9g}")
h = hashlib.sha256()
for p in model.parameters():
    h.update(p.detach().numpy().tobytes())
print("sha256", h.hexdigest())
