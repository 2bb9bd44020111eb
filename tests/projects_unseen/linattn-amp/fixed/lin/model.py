import torch
from torch import nn


class LinearAttention(nn.Module):
    """softmax(QK^T)V replaced by phi(Q)(phi(K)^T V): cost linear in the length."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    @staticmethod
    def feature_map(x):
        return torch.relu(x) ** 2

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        with torch.autocast(x.device.type, enabled=False):  # the sums over the length need float32
            q, k, v = self.feature_map(q.float()), self.feature_map(k.float()), v.float()
            context = k.transpose(-1, -2) @ v
            norm = (q * k.sum(dim=-2, keepdim=True)).sum(dim=-1, keepdim=True)
            out = (q @ context) / (norm + 1e-3)
        return self.proj(out.transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn = LinearAttention(dim, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x):
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class LinearTransformer(nn.Module):
    def __init__(self, sensors, dim, heads, depth, classes):
        super().__init__()
        self.embed = nn.Linear(sensors, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(1, 512, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        h = self.embed(x) + self.pos[:, : x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(dim=1))
