"""Multi-task regression of chemical assays: a compound is measured in few assays, the other targets are NaN."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(13)
torch.set_num_threads(1)

N, BITS, TASKS = 320, 40, 6


def assays():
    x = (torch.rand(N, BITS) < 0.25).float()
    w = torch.randn(BITS, TASKS) / 3
    y = x @ w + 0.05 * torch.randn(N, TASKS)
    y[torch.rand(N, TASKS) < 0.6] = float("nan")
    y[:, 0] = torch.where(torch.rand(N) < 0.95, float("nan"), y[:, 0])  # hardly ever measured
    counts = torch.poisson(x[:, :4].sum(1).exp() - 1)  # often zero
    return x, y, counts


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(BITS, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU())
        self.tasks = nn.Linear(32, TASKS)
        self.rate = nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.tasks(h), F.relu(self.rate(h)).squeeze(1)


def masked_mse(pred, y):
    mask = ~torch.isnan(y)
    return (pred[mask] - y[mask]).square().mean()


def masked_huber(pred, y):
    mask = ~torch.isnan(y)
    y = torch.where(mask, y, torch.zeros_like(y))
    return (F.smooth_l1_loss(pred, y, reduction="none") * mask).sum() / mask.sum()


def log_ratio(rate, counts):
    """Squared log error where both are positive; elsewhere the plain distance. The rate is often exactly 0."""
    log_counts = counts.log()  # -inf for a count of zero, no gradient here
    both = (rate > 0.05) & torch.isfinite(log_counts)
    safe = torch.where(both, rate, torch.ones_like(rate))
    err = torch.where(both, safe.log() - log_counts, torch.zeros_like(rate))
    return (err.square() + torch.where(both, 0.0, (rate - counts).abs())).mean()


@torch.no_grad()
def report(model, x, y):
    model.eval()
    err = (model(x)[0] - y).abs()  # NaN where there is no target
    model.train()
    return torch.nanmean(err).item(), torch.nanmedian(err[:, 1:], 0).values.amax().item()


x, y, counts = assays()
loader = DataLoader(TensorDataset(x, y, counts), batch_size=32, shuffle=True)
model = Net()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
step, best = 0, float("inf")
for epoch in range(6):
    for bx, by, bc in loader:
        pred, rate = model(bx)
        loss = masked_mse(pred, by) + 0.5 * masked_huber(pred, by) + 0.1 * log_ratio(rate, bc)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.9g}")
        step += 1
    mean, worst = report(model, x, y)
    best = min(best, mean)
    print(f"epoch {epoch} mean error {mean:.9g} worst median {worst:.9g} best {best:.9g}")

h = hashlib.sha256()
for p in model.parameters():
    h.update(p.detach().numpy().tobytes())
print("sha256", h.hexdigest())
