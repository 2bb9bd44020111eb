"""Synthetic cohort: one CSV per clinic. Follow-up is recorded in days."""
import csv

import numpy as np
import torch

COLUMNS = ["age", "stage", "marker", "bmi", "smoker"]
TRUE = np.array([0.5, 0.8, -0.4, 0.2, 0.3])
SITES = ["north", "harbour", "valley", "college", "lakeside", "hill", "station", "airport", "riverside"]


def patients(rng, n, same_day_admissions):
    x = rng.standard_normal((n, len(COLUMNS)))
    scale = 900 * np.exp(-x @ TRUE)
    days = scale * rng.weibull(1.3, n)
    censor = rng.uniform(200, 2500, n)
    event = days <= censor
    days = np.minimum(days, censor)
    days = np.maximum(1, np.round(days)).astype(int)
    if same_day_admissions:  # this emergency ward also records deaths on the day of admission
        worst = np.argsort(scale)[:2]
        days[worst], event[worst] = 0, True
    return x, days, event.astype(int)


def prepare(root):
    if root.exists():
        return
    root.mkdir(parents=True)
    rng = np.random.default_rng(4)
    for site in SITES:
        x, days, event = patients(rng, int(rng.integers(60, 140)), site == "airport")
        with open(root / f"{site}.csv", "w", newline="") as f:
            rows = csv.writer(f)
            rows.writerow(COLUMNS + ["days", "event"])
            rows.writerows([*(f"{v:.4f}" for v in xi), d, e] for xi, d, e in zip(x, days, event))


def load_sites(root):
    sites = {}
    for path in sorted(root.glob("*.csv")):
        with open(path) as f:
            rows = list(csv.DictReader(f))
        x = torch.tensor([[float(r[c]) for c in COLUMNS] for r in rows])
        years = torch.tensor([float(r["days"]) for r in rows]) / 365.25
        event = torch.tensor([float(r["event"]) for r in rows])
        sites[path.stem] = (x, years, event)
    return sites
