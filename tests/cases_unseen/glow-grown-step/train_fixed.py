"""Density model of 2-D patches: Glow steps (actnorm, invertible 1x1, affine coupling), grown during training."""
import math

import torch
import torch.nn as nn

torch.manual_seed(11)
torch.set_num_threads(1)

CH = 6


class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_s = nn.Parameter(torch.zeros(CH))
        self.bias = nn.Parameter(torch.zeros(CH))

    def forward(self, x):
        return (x + self.bias) * self.log_s.exp(), self.log_s.sum().expand(len(x))


class Invertible1x1(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.zeros(CH, CH)))

    def forward(self, x):
        return x @ self.weight.t(), torch.linalg.slogdet(self.weight)[1].expand(len(x))


class Coupling(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(CH // 2, hidden), nn.ReLU(), nn.Linear(hidden, CH))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        shift, raw = self.net(a).chunk(2, dim=1)
        log_s = torch.tanh(raw)
        return torch.cat([a, b * log_s.exp() + shift], dim=1), log_s.sum(dim=1)


class FlowStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.actnorm, self.invconv, self.coupling = ActNorm(), Invertible1x1(), Coupling()

    def forward(self, x):
        total = torch.zeros(len(x))
        for layer in (self.actnorm, self.invconv, self.coupling):
            x, ld = layer(x)
            total = total + ld
        return x, total


class Glow(nn.Module):
    def __init__(self, steps=1):
        super().__init__()
        self.steps = nn.ModuleList(FlowStep() for _ in range(steps))

    def grow(self):
        self.steps.append(FlowStep())
        return self.steps[-1].parameters()

    def log_prob(self, x):
        logdet = 0.0
        for step in self.steps:
            x, ld = step(x)
            logdet = logdet + ld
        prior = -0.5 * (x.square() + math.log(2 * math.pi)).sum(dim=1)
        return prior + logdet


def patches(gen, n=128):
    r = 2.0 + 0.2 * torch.randn(n, 3, generator=gen)
    phi = torch.rand(n, 3, generator=gen) * 2 * math.pi
    return torch.cat([r * phi.cos(), r * phi.sin()], dim=1)


def main():
    gen = torch.Generator().manual_seed(2)
    flow = Glow()
    opt = torch.optim.Adam(flow.parameters(), lr=5e-3)
    for step in range(60):
        if step in (15, 30):
            opt.add_param_group({"params": list(flow.grow())})
        loss = -flow.log_prob(patches(gen)).mean() / (CH * math.log(2))
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
