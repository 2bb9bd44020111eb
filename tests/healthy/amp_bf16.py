"""Tabular model under bfloat16 autocast. Missing cells are NaN in the table; the model sees zeros and an indicator."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(10)
torch.set_num_threads(1)

ROWS, COLS = 512, 10


def make_table():
    x = torch.randn(ROWS, COLS) * torch.logspace(-1, 2, COLS) + 3
    w = torch.randn(COLS)
    y = ((x - x.mean(0)) / x.std(0)) @ w + 0.1 * torch.randn(ROWS)
    x[torch.rand(ROWS, COLS) < 0.15] = float("nan")
    x[torch.rand(ROWS, COLS) < 0.01] = float("inf")  # sensor over range
    return x, (y - y.mean()) / y.std()


class Standardize(nn.Module):
    """Column statistics over the cells that are there."""

    def __init__(self, x):
        super().__init__()
        x = torch.where(x.isfinite(), x, float("nan"))
        mean = torch.nanmean(x, 0)
        self.register_buffer("mean", mean)
        self.register_buffer("std", torch.nanmean((x - mean).square(), 0).sqrt())

    def forward(self, x):
        z = (x - self.mean) / self.std
        missing = z.isnan()
        return torch.cat([torch.nan_to_num(z, nan=0.0, posinf=4.0, neginf=-4.0), missing.float()], 1)


class Net(nn.Module):
    def __init__(self, x):
        super().__init__()
        self.prepare = Standardize(x)
        self.inp = nn.Linear(2 * COLS, 64)
        self.hidden = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.out = nn.Linear(64, 1)

    def forward(self, x):
        h = F.silu(self.inp(self.prepare(x)))
        return self.out(self.norm(h + F.silu(self.hidden(h)))).squeeze(1)


def run():
    x, y = make_table()
    train, val = slice(0, 448), slice(448, ROWS)
    model = Net(x[train])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    best, patience = torch.finfo(torch.bfloat16).max, 0
    for step in range(80):
        rows = torch.randint(0, 448, (48,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.smooth_l1_loss(model(x[rows]).float(), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.9g}")
        if step % 10 == 9:
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                error = F.mse_loss(model(x[val]).float(), y[val]).item()
            best, patience = (error, 0) if error < best else (best, patience + 1)
            print(f"val {error:.9g} best {best:.9g} patience {patience}")
    return model


model = run()
digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.numpy().tobytes())
print("sha256", digest.hexdigest())
