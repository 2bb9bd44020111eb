"""Synthetic house prices as a CSV, and its standardised tensors."""
import csv
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset, random_split

NUMERIC = ["area", "rooms", "age", "distance", "floor"]
DISTRICTS = ["north", "east", "south", "west", "old town"]


def write_csv(path, rows):
    rng = np.random.default_rng()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(NUMERIC + ["district", "price"])
        for _ in range(rows):
            area = rng.lognormal(4.4, 0.4)
            rooms = max(1, int(area / 28 + rng.normal(0, 0.7)))
            age, distance, floor = rng.integers(0, 120), rng.exponential(6), rng.integers(0, 9)
            k = int(rng.integers(len(DISTRICTS)))
            price = area * (1900 + 350 * k - 60 * distance) * (1 - 0.002 * age) * rng.lognormal(0, 0.1) + 9000 * floor
            out.writerow([f"{area:.1f}", rooms, age, f"{distance:.2f}", floor, DISTRICTS[k], f"{max(price, 15000):.0f}"])


def load(cfg):
    path = Path(cfg["path"])
    if not path.exists():
        write_csv(path, cfg["rows"])
    with open(path) as f:
        rows = list(csv.DictReader(f))
    x = np.array([[float(r[c]) for c in NUMERIC] for r in rows])
    x = (x - x.mean(0)) / x.std(0)
    onehot = np.eye(len(DISTRICTS))[[DISTRICTS.index(r["district"]) for r in rows]]
    y = np.log(np.array([float(r["price"]) for r in rows]))
    y = (y - y.mean()) / y.std()
    data = TensorDataset(torch.tensor(np.hstack([x, onehot]), dtype=torch.float32), torch.tensor(y, dtype=torch.float32))
    test = int(cfg["test_fraction"] * len(data))
    return random_split(data, [len(data) - test, test])
