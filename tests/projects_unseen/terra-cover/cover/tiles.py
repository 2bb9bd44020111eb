import numpy as np
import torch
from torch.utils.data import Dataset


def smooth_noise(rng, size, cells):
    coarse = rng.normal(size=(cells, cells))
    k = size // cells
    big = np.kron(coarse, np.ones((k, k)))
    pad = np.pad(big, k // 2, mode="reflect")
    out = np.zeros_like(big)
    for dy in range(k):
        for dx in range(k):
            out += pad[dy:dy + size, dx:dx + size]
    return out / (k * k)


class Tiles(Dataset):
    """Synthetic multispectral tiles: water, crop, forest, built-up."""

    signatures = np.array([[0.05, 0.06, 0.04, 0.02, 0.01],
                           [0.08, 0.12, 0.10, 0.40, 0.25],
                           [0.03, 0.06, 0.04, 0.35, 0.15],
                           [0.18, 0.20, 0.22, 0.28, 0.32]])

    def __init__(self, n, size, seed):
        rng = np.random.default_rng(seed)
        self.x = np.zeros((n, 5, size, size), np.float32)
        self.y = np.zeros((n, size, size), np.int64)
        for i in range(n):
            height, wet = smooth_noise(rng, size, 4), smooth_noise(rng, size, 8)
            label = np.where(height < -0.25, 0, np.where(wet > 0.15, 2, 1))
            label[(height > 0.3) & (wet < 0)] = 3
            haze = rng.normal(0, 0.02)
            self.x[i] = self.signatures[label].transpose(2, 0, 1) + haze + rng.normal(0, 0.03, (5, size, size))
            self.y[i] = label

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x, y = torch.from_numpy(self.x[i]), torch.from_numpy(self.y[i])
        return (x - 0.15) / 0.13, y
