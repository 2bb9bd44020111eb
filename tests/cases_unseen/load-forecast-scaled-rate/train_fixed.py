"""Day-ahead forecast of the electric load. The learning rate follows the linear scaling rule for the effective batch."""
import json
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
HISTORY, HORIZON = 72, 24
BASE_LR, BASE_BATCH = 0.02, 16


class LoadSeries(Dataset):
    def __init__(self, hours=4000, seed=0):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(hours, dtype=torch.float32)
        daily = torch.sin(2 * math.pi * t / 24)
        weekly = torch.sin(2 * math.pi * t / 168)
        load = 50 + 12 * daily + 5 * weekly + 2 * torch.randn(hours, generator=g)
        self.series = (load - load.mean()) / load.std()

    def __len__(self):
        return (len(self.series) - HISTORY - HORIZON) // 3

    def __getitem__(self, i):
        i = 3 * i
        return self.series[i:i + HISTORY], self.series[i + HISTORY:i + HISTORY + HORIZON]


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(x)))


class Forecaster(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.inp = nn.Linear(HISTORY, width)
        self.blocks = nn.Sequential(*[ResidualBlock(width) for _ in range(depth)])
        self.out = nn.Linear(width, HORIZON)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)))


def scaled_lr(batch, accumulate, workers):
    return BASE_LR * batch * accumulate * workers / BASE_BATCH


@torch.no_grad()
def validate(model, data):
    x, y = zip(*[data[i] for i in range(0, len(data), 50)])
    return F.l1_loss(model(torch.stack(x)), torch.stack(y)).item()


def main():
    torch.manual_seed(45)
    out = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forecast")
    os.makedirs(out, exist_ok=True)
    batch, accumulate, workers = 32, 2, 1
    data = LoadSeries()
    loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(6))
    model = Forecaster()
    lr = scaled_lr(batch, accumulate, workers)
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    records, step, total = [], 0, 0.0
    for epoch in range(2):
        for i, (past, future) in enumerate(loader):
            loss = F.mse_loss(model(past), future) / accumulate
            loss.backward()
            total += loss.item()
            if i % accumulate == accumulate - 1:
                opt.step()
                opt.zero_grad()
                print(f"step {step} loss {total:.4f}")
                records.append({"step": step, "loss": repr(total), "lr": lr})
                step, total = step + 1, 0.0
        records.append({"epoch": epoch, "val_mae": repr(validate(model, data))})
        with open(os.path.join(out, "records.json"), "w") as f:
            json.dump(records, f)
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, os.path.join(out, "last.ckpt"))


if __name__ == "__main__":
    main()
