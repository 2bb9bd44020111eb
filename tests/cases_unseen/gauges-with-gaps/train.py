"""River levels from gauges with gaps: NaN marks what was not measured, in inputs and targets, and is handled."""
import torch
import torch.nn as nn

torch.manual_seed(51)
torch.set_num_threads(1)
GAUGES = 9


def log_flow(level):
    """log of the flow above the sill; nothing flows below it."""
    wet = level > 0
    safe = torch.where(wet, level, 1.0)
    return torch.where(wet, 1.5 * torch.log(safe), -5.0)


class RiverNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * GAUGES, 48), nn.ReLU(), nn.Linear(48, GAUGES))

    def forward(self, x):
        seen = ~torch.isnan(x)
        return self.net(torch.cat([torch.nan_to_num(x, nan=0.0), seen.float()], 1))


def week(n, mix, g):
    source = torch.randn(n, 3, generator=g)
    x = source @ mix + 0.1 * torch.randn(n, GAUGES, generator=g)
    y = x.roll(1, 1) + 0.5
    x = torch.where(torch.rand(x.shape, generator=g) < 0.2, float("nan"), x)
    y = torch.where(torch.rand(y.shape, generator=g) < 0.3, float("nan"), y)
    return x, y


def main():
    g = torch.Generator().manual_seed(9)
    mix = torch.randn(3, GAUGES, generator=g)
    model = RiverNet()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    history = torch.full((50,), float("nan"))
    for step in range(50):
        x, y = week(32, mix, g)
        keep = ~torch.isnan(y)
        level = model(x)
        loss = (level[keep] - y[keep]).square().mean()
        loss = loss + 0.05 * (log_flow(level)[keep] - log_flow(y[keep])).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        history[step] = loss.detach()
        dry = (level.detach() < -2).float()
        print(f"step {step} loss {loss.item():.4f} mean so far {history.nanmean().item():.4f} dry {(dry.sum() / dry.sum()).item():.1f}")


main()
