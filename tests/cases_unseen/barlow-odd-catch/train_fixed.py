"""Barlow Twins on fish echo traces, 97 traces in the catch, batches of 16."""
import json
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(41)
torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv1d(8, 16, 5, stride=2), nn.ReLU())
        self.project = nn.Linear(16 * 13, dim)

    def forward(self, x):
        return self.project(self.conv(x).flatten(1))


def barlow(a, b, off=0.01):
    a = (a - a.mean(0)) / a.std(0)
    b = (b - b.mean(0)) / b.std(0)
    c = a.t() @ b / len(a)
    on_diagonal = (torch.diagonal(c) - 1).pow(2).sum()
    return on_diagonal + off * (c.pow(2).sum() - torch.diagonal(c).pow(2).sum())


def augment(x):
    return x * (0.8 + 0.4 * torch.rand(len(x), 1, 1)) + 0.1 * torch.randn_like(x)


def main():
    os.makedirs("echo", exist_ok=True)
    t = torch.linspace(0, 6, 64)
    traces = torch.stack([torch.sin((1 + 0.05 * i) * t) for i in range(97)])[:, None]
    loader = DataLoader(TensorDataset(traces), batch_size=16, shuffle=True, drop_last=True)
    model = Encoder()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, record = 0, []
    for epoch in range(6):
        for (x,) in loader:
            loss = barlow(model(augment(x)), model(augment(x)))
            opt.zero_grad()
            loss.backward()
            opt.step()
            record.append(loss.item())
            print(f"step {step} loss {loss.item():.4f}")
            step += 1
        with open("echo/record.json", "w") as f:
            json.dump(record, f)


if __name__ == "__main__":
    main()
