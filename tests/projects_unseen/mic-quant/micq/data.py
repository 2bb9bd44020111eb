from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


def clip(rng, word, cfg, mics=3):
    """The prototype boards have three microphones; the fourth channel is there for the next revision."""
    t = np.arange(cfg.frames)
    source = np.sin(2 * np.pi * (0.02 + 0.03 * word) * t) * np.hanning(cfg.frames)
    x = np.zeros((cfg.mics, cfg.frames))
    for m in range(mics):
        x[m] = rng.uniform(0.5, 1.2) * np.roll(source, rng.integers(-3, 4)) + 0.2 * rng.standard_normal(cfg.frames)
    return np.clip(x * 8000, -32768, 32767).astype(np.int16)


def prepare(cfg):
    root = Path(cfg.data)
    if root.exists():
        return
    root.mkdir(parents=True)
    rng = np.random.default_rng(cfg.seed)
    for split, n in (("train", cfg.clips), ("test", cfg.clips // 5)):
        y = rng.integers(0, cfg.words, n)
        np.savez(root / f"{split}.npz", x=np.stack([clip(rng, w, cfg) for w in y]), y=y)


class Clips(Dataset):
    def __init__(self, cfg, split):
        with np.load(Path(cfg.data) / f"{split}.npz") as z:
            self.x, self.y = z["x"], z["y"]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i].astype(np.float32) / 4096), int(self.y[i])


def loader(cfg, split):
    return DataLoader(Clips(cfg, split), cfg.batch, shuffle=split == "train", num_workers=cfg.workers if split == "train" else 0,
                      persistent_workers=cfg.workers > 0 and split == "train", generator=torch.Generator().manual_seed(cfg.seed))
