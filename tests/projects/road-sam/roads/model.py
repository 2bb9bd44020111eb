import torch
import torch.nn as nn
import torch.nn.functional as F


class MeanConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.own = nn.Linear(cin, cout)
        self.near = nn.Linear(cin, cout, bias=False)

    def forward(self, x, edges):
        src, dst = edges
        total = torch.zeros_like(x).index_add(0, dst, x[src])
        count = torch.zeros(len(x), 1).index_add(0, dst, torch.ones(len(dst), 1))
        return self.own(x) + self.near(total / count.clamp(min=1))


class SpeedNet(nn.Module):
    def __init__(self, features, dim=32, depth=3, dropout=0.1):
        super().__init__()
        self.encode = nn.Linear(features, dim)
        self.convs = nn.ModuleList(MeanConv(dim, dim) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(dim, 1)

    def forward(self, x, edges):
        h = F.relu(self.encode(x))
        for conv, norm in zip(self.convs, self.norms):
            h = h + self.drop(F.relu(conv(norm(h), edges)))
        return self.head(h).squeeze(-1)


def masked_mse(pred, target, mask):
    """Mean squared error over the nodes that carry a sensor."""
    err = (pred - target) ** 2 * mask
    return err.sum() / mask.sum().clamp(min=1)
