"""Synthetic cochleagrams: every word is a moving ridge of energy over the channels."""
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


def _render(rng, label, channels, frames):
    t = np.arange(frames) / frames
    centre = {0: 4 + 14 * t, 1: 18 - 14 * t, 2: 11 + 6 * np.sin(6.28 * t), 3: 11 + 0 * t}[label]
    grid = np.arange(channels)[None, :]
    ridge = np.exp(-((grid - centre[:, None] - rng.normal(0, 1)) ** 2) / 6.0)
    noise = rng.random((frames, channels)) < 0.05
    gain = 0.5 * rng.lognormal(0.0, 0.2)
    return (gain * ridge + 0.3 * noise).astype(np.float32)


def ensure_dataset(folder, cfg, seed):
    folder = Path(folder)
    if (folder / "train.npz").exists() and (folder / "val.npz").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for split, n in (("train", cfg["n_train"]), ("val", cfg["n_val"])):
        y = rng.integers(0, 4, n)
        x = np.stack([_render(rng, int(c), cfg["channels"], cfg["frames"]) for c in y])
        np.savez_compressed(folder / f"{split}.npz", x=x, y=y)


class Cochleagrams(Dataset):
    def __init__(self, path):
        self.path = path
        self._data = None
        with np.load(path) as f:
            self.n = len(f["y"])

    def _open(self):
        if self._data is None:  # each worker opens its own copy
            with np.load(self.path) as f:
                self._data = (f["x"], f["y"])
        return self._data

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        x, y = self._open()
        return torch.from_numpy(x[i]), int(y[i])


def build_loaders(folder, cfg):
    folder = Path(folder)
    train = DataLoader(Cochleagrams(folder / "train.npz"), batch_size=cfg["batch_size"], shuffle=True,
                       num_workers=cfg["workers"], persistent_workers=cfg["workers"] > 0)
    val = DataLoader(Cochleagrams(folder / "val.npz"), batch_size=48)
    return train, val
