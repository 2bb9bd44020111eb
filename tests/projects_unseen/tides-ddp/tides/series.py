"""Water level at many harbours in millimetres: sums of a few tides."""
import numpy as np
import torch
from torch.utils.data import Dataset

PERIODS = np.array([12.42, 12.0, 25.82, 23.93])


class Harbours(Dataset):
    def __init__(self, harbours, context, horizon, seed):
        rng = np.random.default_rng(seed)
        self.range = np.sort(rng.gamma(2.0, 400.0, harbours)) + 150  # mm; the Bay of Fundy is last
        self.mix = rng.dirichlet(np.ones(4), harbours)
        self.phase = rng.uniform(0, 2 * np.pi, (harbours, 4))
        self.context, self.horizon, self.rng = context, horizon, rng
        self.start = rng.uniform(0, 2000, harbours)

    def __len__(self):
        return len(self.range)

    def __getitem__(self, i):
        t = self.start[i] + np.arange(self.context + self.horizon)
        level = (self.mix[i, :, None] * np.cos(2 * np.pi * t / PERIODS[:, None] + self.phase[i, :, None])).sum(0)
        level = torch.from_numpy((self.range[i] * level).astype(np.float32))
        return level[: self.context], level[self.context:]
