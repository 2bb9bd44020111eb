"""Load forecasting: the scaling constants live in the model; checkpoints are stored in half precision to save space."""
import io

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(18)
torch.set_num_threads(1)
HOURS, AHEAD = 24, 6


class Standardize(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def fit(self, x):
        self.mean.copy_(x.mean())
        self.std.copy_(x.std())

    def forward(self, x):
        return (x - self.mean) / self.std

    def inverse(self, z):
        return z * self.std + self.mean


class Forecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.scale = Standardize()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, AHEAD)

    def forward(self, load):
        h, _ = self.rnn(self.scale(load).unsqueeze(-1))
        return self.head(h[:, -1])


class Grid:
    """Hourly load of a district in kilowatts."""

    def __init__(self, seed, base=90000.0):
        self.g, self.base = torch.Generator().manual_seed(seed), base

    def windows(self, n):
        t0 = torch.randint(0, 24, (n, 1), generator=self.g)
        hour = t0 + torch.arange(HOURS + AHEAD)
        load = self.base * (1 + 0.3 * torch.sin(hour * 2 * torch.pi / 24))
        load = load + 0.03 * self.base * torch.randn(load.shape, generator=self.g)
        return load[:, :HOURS], load[:, HOURS:]


def save(model):
    buf = io.BytesIO()
    torch.save({k: v if k.startswith("scale.") else v.half() for k, v in model.state_dict().items()}, buf)
    return buf.getvalue()


def restore(blob):
    model = Forecaster()
    model.load_state_dict(torch.load(io.BytesIO(blob)))
    return model


def train(model, grid, steps, lr):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for step in steps:
        past, future = grid.windows(16)
        loss = F.mse_loss(model(past), model.scale(future))
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    grid = Grid(seed=2)
    model = Forecaster()
    model.scale.fit(grid.windows(200)[0])
    train(model, grid, range(25), lr=3e-3)
    model = restore(save(model))  # second phase with a smaller rate
    train(model, grid, range(25, 40), lr=1e-3)
