"""Temporal conv net with weight normalisation; the weakest filters are pruned half-way and may regrow."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(9)
torch.set_num_threads(1)


class TemporalBlock(nn.Module):
    def __init__(self, cin, cout, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = weight_norm(nn.Conv1d(cin, cout, 3, dilation=dilation))
        self.skip = nn.Conv1d(cin, cout, 1)

    def forward(self, x):
        y = self.conv(F.pad(x, (self.pad, 0)))
        return F.relu(y) + self.skip(x)


class TCN(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList([TemporalBlock(1, width, 1), TemporalBlock(width, width, 2), TemporalBlock(width, width, 4)])
        self.readout = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.readout(x[..., -1]).squeeze(-1)


@torch.no_grad()
def prune_filters(model, fraction=0.2):
    """Reset the filters with the smallest gain in the hidden blocks."""
    for block in model.blocks[1:]:
        params = block.conv.parametrizations.weight
        gain = params.original0.flatten().abs()
        weakest = gain.argsort()[: int(fraction * len(gain))]
        params.original0[weakest] = 0.0


def series(n, g, length=32):
    freq = torch.rand(n, 1, generator=g) * 0.4 + 0.1
    phase = torch.rand(n, 1, generator=g) * 6.28
    t = torch.arange(length + 1).float()
    y = torch.sin(freq * t + phase) + 0.05 * torch.randn(n, length + 1, generator=g)
    return y[:, None, :-1], y[:, -1]


def main():
    g = torch.Generator().manual_seed(15)
    model = TCN()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(60):
        if step == 30:
            prune_filters(model)
        x, target = series(32, g)
        loss = F.mse_loss(model(x), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
