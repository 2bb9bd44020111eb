"""Wind-turbine power from SCADA logs: CSV in, standardised windows, small GRU."""
import csv
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(23)
torch.set_num_threads(1)

COLUMNS = ["wind_speed", "direction", "rotor_rpm", "temperature", "power"]
WINDOW, ROWS = 12, 400


def write_log(path):
    rng = np.random.default_rng(0)
    wind = 8 + np.cumsum(rng.normal(0, 0.3, ROWS)).clip(-5, 8)
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["time"] + COLUMNS)
        for i, w in enumerate(wind):
            rpm = 1.4 * w + rng.normal(0, 0.2)
            power = 0.5 * w ** 2 + rng.normal(0, 1)
            row = [f"{i:05d}", f"{w:.2f}", f"{rng.uniform(0, 360):.0f}", f"{rpm:.2f}", f"{12 + rng.normal():.1f}", f"{power:.2f}"]
            if i == 287:
                row[3] = ""
            out.writerow(row)


def read_log(path):
    table = np.genfromtxt(path, delimiter=",", skip_header=1, usecols=range(1, 6), dtype=np.float32)
    mean, std = np.nanmean(table, axis=0), np.nanstd(table, axis=0)
    return np.nan_to_num((table - mean) / std)


class Windows(Dataset):
    """Consecutive, non-overlapping windows; the target is the power of the last row."""

    def __init__(self, table):
        self.table = torch.from_numpy(table)

    def __len__(self):
        return len(self.table) // WINDOW

    def __getitem__(self, i):
        rows = self.table[i * WINDOW:(i + 1) * WINDOW]
        return rows[:, :-1], rows[-1, -1]


class PowerModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inp = nn.Linear(len(COLUMNS) - 1, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h, _ = self.gru(F.relu(self.inp(x)))
        return self.out(h[:, -1]).squeeze(-1)


def main():
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "turbine_07.csv")
        write_log(path)
        table = read_log(path)
    loader = DataLoader(Windows(table), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))
    model = PowerModel()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = 0
    for epoch in range(3):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


main()
