"""Discrete-time churn model: a hazard per week, the survival curve is the running product of (1 - hazard)."""
import torch
import torch.nn as nn

torch.manual_seed(31)
torch.set_num_threads(1)
WEEKS = 52


class Hazard(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, WEEKS))

    def forward(self, x):
        return torch.sigmoid(self.net(x) - 1.0)


def nll(hazard, week, churned):
    survival = torch.cumprod(1 - hazard, dim=1)
    before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], 1)
    index = week[:, None]
    log_event = torch.log(hazard.gather(1, index) * before.gather(1, index) + 1e-12)
    log_censored = torch.log(survival.gather(1, index))
    return -torch.where(churned[:, None], log_event, log_censored).mean()


def customers(n, g, impatient):
    x = torch.randn(n, 6, generator=g)
    rate = torch.exp(impatient * x[:, 0] + 0.3 * x[:, 1])
    week = (torch.empty(n).exponential_(generator=g) * 8 / rate).long()
    churned = week < 40
    loyal = torch.rand(n, generator=g) < 0.05
    week = torch.where(loyal, torch.full_like(week, WEEKS - 1), week.clamp(max=39))
    return x, week, churned & ~loyal


def main():
    g = torch.Generator().manual_seed(5)
    model = Hazard()
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    for step in range(120):
        x, week, churned = customers(48, g, impatient=2.0)
        if step > 60:  # the new tariff has no ceiling: some usage scores are far beyond those of the old one
            x[:5, 0] = 12 + 4 * x[:5, 0].abs()
            week[:5], churned[:5] = 0, True
        loss = nll(model(x), week, churned)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0 or not torch.isfinite(loss):
            print(f"step {step} loss {loss.item():.4f}")


main()
