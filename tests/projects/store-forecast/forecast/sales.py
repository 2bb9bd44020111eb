"""Weekly turnover of stores, from corner shops to hypermarkets."""
from pathlib import Path

import numpy as np
import torch


def prepare(workdir, cfg, seed):
    path = Path(workdir) / "sales.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(seed)
        n, t = cfg["stores"], np.arange(cfg["weeks"])
        level = np.exp(rng.normal(10.3, 0.8, (n, 1)))
        season = 1 + 0.3 * np.sin(2 * np.pi * (t / 52 + rng.random((n, 1))))
        trend = 1 + rng.normal(0, 0.002, (n, 1)) * t
        sales = level * season * trend * np.exp(0.08 * rng.standard_normal((n, len(t))))
        np.savez(path, sales=sales.astype(np.float32), level=level[:, 0].astype(np.float32))
    with np.load(path) as z:
        return torch.from_numpy(z["sales"])


def select(sales, which):
    if which == "all":
        return torch.arange(len(sales))
    order = sales.mean(1).argsort(descending=True)
    return order[: len(sales) // 3]


class Windows:
    """Random windows of the chosen stores."""

    def __init__(self, sales, stores, context, horizon, batch, seed):
        self.sales, self.stores = sales, stores
        self.context, self.horizon, self.batch = context, horizon, batch
        self.rng = torch.Generator().manual_seed(seed)

    def draw(self):
        pick = self.stores[torch.randint(len(self.stores), (self.batch,), generator=self.rng)]
        start = torch.randint(self.sales.shape[1] - self.context - self.horizon, (self.batch,), generator=self.rng)
        span = start[:, None] + torch.arange(self.context + self.horizon)
        window = self.sales[pick[:, None], span]
        return pick, window[:, : self.context], window[:, self.context:]
