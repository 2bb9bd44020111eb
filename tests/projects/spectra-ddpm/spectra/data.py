"""Synthetic Raman spectra: a few Lorentz peaks on a fluorescence background."""
from pathlib import Path

import numpy as np
import torch

LENGTH = 64


def synthesise(n, rng):
    axis = np.linspace(0, 1, LENGTH)
    out = np.empty((n, LENGTH), np.float32)
    for i in range(n):
        y = rng.uniform(0, 0.6) * np.exp(-axis / rng.uniform(0.3, 1.0))
        for _ in range(rng.integers(2, 5)):
            centre, width = rng.uniform(0.05, 0.95), rng.uniform(0.01, 0.04)
            y += rng.uniform(0.3, 1.0) / (1 + ((axis - centre) / width) ** 2)
        out[i] = y
    return out


def load(root, n, seed):
    path = Path(root) / "spectra.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, synthesise(n, np.random.default_rng(seed)))
    x = torch.from_numpy(np.load(path))
    mean, std = x.mean(), x.std()
    return ((x - mean) / std).unsqueeze(1), {"mean": mean.item(), "std": std.item()}
