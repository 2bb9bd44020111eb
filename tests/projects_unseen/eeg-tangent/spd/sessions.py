import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

CHANNELS, SAMPLES = 8, 128


def trial(rng, label, quality):
    t = np.arange(SAMPLES) / 128.0
    x = rng.normal(0, 1.0, (CHANNELS, SAMPLES))
    x = x + 0.4 * rng.normal(0, 1.0, (1, SAMPLES))
    mu = np.sin(2 * np.pi * (10 + rng.normal(0, 0.5)) * t + rng.uniform(0, 6.28))
    left, right = (1.5, 0.5) if label == 0 else (0.5, 1.5)
    x[1:3] += left * mu
    x[5:7] += right * mu
    x = x - x.mean(1, keepdims=True)
    x[quality == 0] = 0.0
    return x.astype(np.float32)


class Sessions(IterableDataset):
    """Trials session after session, in the order of recording."""

    def __init__(self, n_sessions, trials, seed):
        self.n_sessions, self.trials, self.seed = n_sessions, trials, seed

    def __iter__(self):
        rng = np.random.default_rng(self.seed)
        for session in range(self.n_sessions):
            quality = np.ones(CHANNELS, int)
            if session % 4 == 2:
                quality[rng.integers(CHANNELS)] = 0
            if session == 7:
                quality[[0, 7]] = 0
            for _ in range(self.trials):
                label = int(rng.integers(2))
                yield torch.from_numpy(trial(rng, label, quality)), label


def make_loader(n_sessions, trials, batch, seed):
    return DataLoader(Sessions(n_sessions, trials, seed), batch)
