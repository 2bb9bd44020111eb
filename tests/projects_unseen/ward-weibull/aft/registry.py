"""Builds the hospital registry (one CSV) and serves rolling windows of it."""
import csv
from pathlib import Path

import numpy as np
import torch

COLUMNS = ["month", "site", "age", "sofa", "lactate", "creatinine", "ventilated", "days", "died"]


def build_registry(path, months, per_month, seed):
    rng = np.random.default_rng(seed)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as fh:
        w = csv.writer(fh)
        w.writerow(COLUMNS)
        for month in range(months):
            n_sites = 2 if month < 17 else 3
            for _ in range(per_month):
                site = int(rng.integers(n_sites))
                age = float(np.clip(rng.normal(64, 14), 18, 97))
                sofa = int(rng.poisson(5))
                lactate = float(rng.gamma(2.0, 1.1))
                creat = float(rng.gamma(2.5, 0.5))
                vent = int(rng.random() < 0.35)
                eta = 3.1 - 0.02 * (age - 64) - 0.12 * (sofa - 5) - 0.15 * lactate - 0.4 * vent
                t = float(np.exp(eta) * rng.weibull(0.8))
                c = float(rng.exponential(14.0))
                days, died = (t, 1) if t <= c else (c, 0)
                days = max(days, 0.02)
                if site == 2:
                    days = np.floor(days) if not died else np.ceil(days)
                w.writerow([month, site, f"{age:.1f}", sofa, f"{lactate:.2f}", f"{creat:.2f}", vent,
                            f"{days:.2f}", died])
    return path


class Registry:
    def __init__(self, path):
        with open(path) as fh:
            rows = list(csv.DictReader(fh))
        self.month = np.array([int(r["month"]) for r in rows])
        feats = np.array([[float(r[k]) for k in ("age", "sofa", "lactate", "creatinine", "ventilated")] for r in rows])
        first = feats[self.month < 3]
        feats = (feats - first.mean(0)) / first.std(0)
        self.x = torch.tensor(feats, dtype=torch.float32)
        self.days = torch.tensor([float(r["days"]) for r in rows])
        self.died = torch.tensor([int(r["died"]) for r in rows], dtype=torch.bool)

    def window(self, month, width):
        idx = np.nonzero((self.month <= month) & (self.month > month - width))[0]
        return torch.from_numpy(idx)

    def batches(self, month, width, size, count, generator):
        idx = self.window(month, width)
        for _ in range(count):
            pick = idx[torch.randperm(len(idx), generator=generator)[:size]]
            yield self.x[pick], self.days[pick], self.died[pick]
