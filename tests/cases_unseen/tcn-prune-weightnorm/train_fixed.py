"""Temporal convolution network (weight-normalised) for load forecasting, with magnitude pruning of filters."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(6)
torch.set_num_threads(1)

HISTORY, HORIZON = 48, 6


class CausalConv(nn.Module):
    def __init__(self, cin, cout, k=3, dilation=1):
        super().__init__()
        self.pad = (k - 1) * dilation
        self.conv = weight_norm(nn.Conv1d(cin, cout, k, dilation=dilation))

    def forward(self, x):
        return self.conv(F.pad(x, (self.pad, 0)))


class TemporalBlock(nn.Module):
    def __init__(self, cin, cout, dilation):
        super().__init__()
        self.c1 = CausalConv(cin, cout, dilation=dilation)
        self.c2 = CausalConv(cout, cout, dilation=dilation)
        self.skip = nn.Conv1d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x):
        h = F.relu(self.c1(x))
        h = F.relu(self.c2(h))
        return F.relu(h + self.skip(x))


class TCN(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.Sequential(*(TemporalBlock(1 if i == 0 else width, width, 2 ** i) for i in range(3)))
        self.head = nn.Linear(width, HORIZON)

    def forward(self, x):
        return self.head(self.blocks(x)[..., -1])


@torch.no_grad()
def prune_filters(conv, amount):
    """Removes the output filters with the smallest norm."""
    w = conv.weight.clone()
    order = w.flatten(1).norm(dim=1).argsort()
    drop = order[: int(amount * len(order))]
    w[drop] *= 1e-4
    conv.weight = w
    return len(drop)


def load_curve(gen, n=24):
    t = torch.arange(HISTORY + HORIZON).float()
    phase = torch.rand(n, 1, generator=gen) * 24
    level = 0.5 + torch.rand(n, 1, generator=gen)
    y = level * (1 + 0.5 * torch.sin((t + phase) * 2 * torch.pi / 24)) + 0.05 * torch.randn(n, len(t), generator=gen)
    return y[:, None, :HISTORY], y[:, HISTORY:]


def main():
    gen = torch.Generator().manual_seed(3)
    model = TCN()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(50):
        x, y = load_curve(gen)
        loss = F.smooth_l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.5f}")
        if step == 24:
            for name, mod in model.named_modules():
                if name.endswith("c2.conv") and "blocks.0" not in name:
                    n = prune_filters(mod, amount=0.25)
                    print(f"pruned {n} filters of {name}")


main()
