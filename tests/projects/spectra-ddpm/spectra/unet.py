import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def timestep_embedding(t, dim):
    freqs = torch.exp(-math.log(10000) * torch.arange(dim // 2) / (dim // 2))
    args = t.float()[:, None] * freqs
    return torch.cat([args.cos(), args.sin()], -1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, emb):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, cin), nn.GroupNorm(4, cout)
        self.conv1, self.conv2 = nn.Conv1d(cin, cout, 3, 1, 1), nn.Conv1d(cout, cout, 3, 1, 1)
        self.emb = nn.Linear(emb, cout)
        self.skip = nn.Conv1d(cin, cout, 1) if cin != cout else nn.Identity()
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x, e):
        h = self.conv1(F.silu(self.norm1(x))) + self.emb(e)[:, :, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet1d(nn.Module):
    def __init__(self, dim=16, emb=32):
        super().__init__()
        self.emb_dim = emb
        self.time = nn.Sequential(nn.Linear(emb, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.inp = nn.Conv1d(1, dim, 3, 1, 1)
        self.down1, self.down2 = ResBlock(dim, dim, emb), ResBlock(dim, 2 * dim, emb)
        self.mid = ResBlock(2 * dim, 2 * dim, emb)
        self.up2, self.up1 = ResBlock(4 * dim, dim, emb), ResBlock(2 * dim, dim, emb)
        self.out = nn.Conv1d(dim, 1, 3, 1, 1)

    def forward(self, x, t):
        e = self.time(timestep_embedding(t, self.emb_dim))
        a = self.down1(self.inp(x), e)
        b = self.down2(F.avg_pool1d(a, 2), e)
        m = self.mid(F.avg_pool1d(b, 2), e)
        u = self.up2(torch.cat([F.interpolate(m, scale_factor=2), b], 1), e)
        u = self.up1(torch.cat([F.interpolate(u, scale_factor=2), a], 1), e)
        return self.out(u)
