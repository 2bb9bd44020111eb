import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .sparsemax import sparsemax


class Block(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.a, self.b = nn.Conv2d(cin, cout, 3, padding=1), nn.Conv2d(cout, cout, 3, padding=1)
        self.na, self.nb = nn.GroupNorm(4, cout), nn.GroupNorm(4, cout)

    def forward(self, x):
        return F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))))


class SmallUNet(nn.Module):
    """U-Net whose blocks are recomputed in the backward pass."""

    def __init__(self, classes, dim=8, recompute=True):
        super().__init__()
        self.recompute = recompute
        self.enc1, self.enc2 = Block(1, dim), Block(dim, 2 * dim)
        self.mid = Block(2 * dim, 4 * dim)
        self.dec2, self.dec1 = Block(6 * dim, 2 * dim), Block(3 * dim, dim)
        self.head = nn.Conv2d(dim, classes, 1)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def run(self, block, x):
        if self.recompute and self.training:
            return checkpoint(block, x, use_reentrant=False)
        return block(x)

    def forward(self, x):
        a = self.run(self.enc1, x)
        b = self.run(self.enc2, F.max_pool2d(a, 2))
        m = self.run(self.mid, F.max_pool2d(b, 2))
        u = self.run(self.dec2, torch.cat([F.interpolate(m, scale_factor=2), b], 1))
        u = self.run(self.dec1, torch.cat([F.interpolate(u, scale_factor=2), a], 1))
        return sparsemax(self.head(u))
