import math

import torch
from torch.utils.data import Dataset

from .rotations import random_rotations


def make_template(n, generator):
    """A lopsided bracket: two plates and a rod."""
    a = torch.rand(n // 2, 3, generator=generator) * torch.tensor([1.6, 0.8, 0.1])
    b = torch.rand(n // 4, 3, generator=generator) * torch.tensor([0.1, 0.8, 1.0])
    t = torch.rand(n - n // 2 - n // 4, generator=generator)
    c = torch.stack([1.6 + 0.4 * t, 0.1 + 0.2 * t, 0.9 * t], 1)
    p = torch.cat([a, b, c])
    p = p - p.mean(0)
    return p / p.norm(dim=1).max()


class PoseClouds(Dataset):
    def __init__(self, n_items, n_points, seed):
        g = torch.Generator().manual_seed(seed)
        self.template = make_template(n_points, torch.Generator().manual_seed(5))
        self.rot = random_rotations(n_items, g)

    def __len__(self):
        return len(self.rot)

    def __getitem__(self, i):
        return self.template @ self.rot[i].T, self.rot[i]


class Augment:
    """Point jitter and dropping, annealed over the training."""

    def __init__(self, jitter, drop, epochs_on):
        self.jitter, self.drop, self.epochs_on = jitter, drop, epochs_on
        self.strength = 1.0

    def set_epoch(self, epoch):
        self.strength = 0.5 * (1 + math.cos(math.pi * min(epoch / self.epochs_on, 1.0)))

    def __call__(self, points):
        out = points + self.strength * self.jitter * torch.randn_like(points)
        lost = torch.rand(points.shape[:2]) < self.strength * self.drop
        return out.masked_fill(lost.unsqueeze(-1), 0.0)
