import torch
import torch.nn as nn


class Interaction(nn.Module):
    """Polynomial vector field: growth, pairwise interactions and a neural correction."""

    def __init__(self, n, hidden=24):
        super().__init__()
        self.growth = nn.Parameter(0.1 * torch.randn(n))
        self.pair = nn.Parameter(0.1 * torch.randn(n, n))
        self.correct = nn.Sequential(nn.Linear(n, hidden), nn.Tanh(), nn.Linear(hidden, n))
        nn.init.zeros_(self.correct[-1].weight)
        nn.init.zeros_(self.correct[-1].bias)

    def forward(self, x):
        rate = self.growth + x @ self.pair.T + self.correct(x)
        return x * rate


def rollout(field, x0, steps, dt):
    """Explicit Euler; returns (batch, steps + 1, species)."""
    x, out = x0, [x0]
    for _ in range(steps):
        x = x + dt * field(x)
        out.append(x)
    return torch.stack(out, dim=1)
