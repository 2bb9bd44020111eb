import torch
import torch.nn as nn


class Standardize(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("std", torch.ones(dim))

    def fit(self, x):
        self.mean.copy_(x.mean(0))
        self.std.copy_(x.std(0))

    def forward(self, x):
        return (x - self.mean) / self.std


class ResidualMLP(nn.Module):
    def __init__(self, n_in=8, width=96, depth=3):
        super().__init__()
        self.scaler = Standardize(n_in)
        self.inp = nn.Linear(n_in, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = self.inp(self.scaler(x))
        for b in self.blocks:
            h = h + b(h)
        return self.out(h).squeeze(-1)
