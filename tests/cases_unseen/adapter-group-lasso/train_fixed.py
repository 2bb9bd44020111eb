"""Adapters for a frozen backbone: after a warm-up a group lasso decides which of the zero-initialised adapters are needed."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(7)
torch.set_num_threads(1)


class Adapter(nn.Module):
    """Low-rank correction that starts as the identity."""

    def __init__(self, dim, rank=4):
        super().__init__()
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, dim, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return x + self.up(F.relu(self.down(x)))


class Backbone(nn.Module):
    def __init__(self, dim=16, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.adapters = nn.ModuleList(Adapter(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 3)
        self.layers.requires_grad_(False)
        self.active = 2  # adapters are switched on from the top

    def forward(self, x):
        for i, (layer, adapter) in enumerate(zip(self.layers, self.adapters)):
            x = torch.tanh(layer(x))
            if i >= len(self.layers) - self.active:
                x = adapter(x)
        return self.head(x)


def group_lasso(model):
    return sum(a.up.weight.square().sum().add(1e-12).sqrt() for a in model.adapters)


def main():
    model = Backbone()
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    w = torch.randn(16, 3)
    for step in range(80):
        x = torch.randn(24, 16)
        y = (x @ w).sin().argmax(-1)
        loss = F.cross_entropy(model(x), y)
        if step >= 30:
            loss = loss + 1e-3 * group_lasso(model)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
