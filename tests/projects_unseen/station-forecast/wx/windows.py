from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from .stations import read_station


class Windows(Dataset):
    """All (past window, next hours of temperature) pairs of a set of stations."""

    def __init__(self, paths, window, horizon):
        self.series = [read_station(p) for p in paths]
        self.window, self.horizon = window, horizon
        stacked = np.concatenate(self.series)
        self.mean = np.nanmean(stacked, axis=0)
        self.std = np.nanstd(stacked, axis=0)
        self.index = [(i, t) for i, s in enumerate(self.series)
                      for t in range(len(s) - window - horizon + 1)]

    def __len__(self):
        return len(self.index)

    def __getitem__(self, n):
        i, t = self.index[n]
        z = (self.series[i] - self.mean) / self.std
        past = z[t:t + self.window]
        future = z[t + self.window:t + self.window + self.horizon, 0]
        return torch.from_numpy(past.astype(np.float32)), torch.from_numpy(future.astype(np.float32))


def split(folder, window, horizon):
    paths = sorted(Path(folder).glob("st*.csv"))
    return Windows(paths[:-1], window, horizon), Windows(paths[-1:], window, horizon)
