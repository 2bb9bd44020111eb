"""SCADA export: seconds, load, solar, temperature, voltage. The logger samples each second, and slower in low-power mode."""
import csv
import math
import random
from pathlib import Path

import torch


def write_series(path, hours, seed):
    path = Path(path)
    if path.exists():
        return
    rng = random.Random(seed)
    t, state, low_power = 0.0, 0.0, 0.65 * hours * 3600
    with open(path, "w", newline="") as f:
        rows = csv.writer(f)
        rows.writerow(["seconds", "load", "solar", "temperature", "voltage"])
        while t < hours * 3600:
            dt = 1.0 if t < low_power else 6.0
            load = 0.5 + 0.3 * math.sin(t / 170) + 0.1 * rng.gauss(0, 1)
            solar = max(0.0, math.sin(t / 900)) * rng.uniform(0.7, 1.0)
            temp = 0.4 * math.sin(t / 2000) + 0.02 * rng.gauss(0, 1)
            state += min(1.0, 0.08 * dt) * (load - 0.6 * solar - state)
            rows.writerow([f"{t:.1f}", f"{load:.4f}", f"{solar:.4f}", f"{temp:.4f}", f"{1 - 0.2 * state + 0.05 * temp:.5f}"])
            t += dt


def chunks(path, length):
    with open(path) as f:
        reader = csv.reader(f)
        next(reader)
        block, last = [], None
        for row in reader:
            t, *values = map(float, row)
            block.append([t - last if last is not None else 1.0, *values])
            last = t
            if len(block) == length:
                x = torch.tensor(block)
                yield x[:, 0], x[:, 1:4], x[:, 4:]
                block = []
