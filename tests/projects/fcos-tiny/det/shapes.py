"""Rectangles, crosses and discs on noise; images and boxes are written as .npz shards."""
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

SHARD = 64


def _draw(img, box, cls, rng):
    x1, y1, x2, y2 = box
    colour = 0.5 + 0.5 * rng.random(3)
    ys, xs = np.mgrid[y1:y2, x1:x2]
    cx, cy = (x1 + x2) / 2, (y1 + y2) / 2
    u, v = (xs + 0.5 - cx) / (x2 - x1) * 2, (ys + 0.5 - cy) / (y2 - y1) * 2
    inside = [np.ones_like(u, bool), (np.abs(u) < 0.35) | (np.abs(v) < 0.35), u ** 2 + v ** 2 < 1][cls]
    img[:, y1:y2, x1:x2] = np.where(inside, colour[:, None, None], img[:, y1:y2, x1:x2])


def prepare(cfg):
    root = Path(cfg["data_dir"])
    if list(root.glob("shard_*.npz")):
        return root
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(cfg["seed"])
    size, cap = cfg["image_size"], cfg["max_objects"]
    for s in range(0, cfg["images"], SHARD):
        imgs = 0.15 * rng.random((SHARD, 3, size, size))
        boxes = np.zeros((SHARD, cap, 4), np.float32)
        labels = np.full((SHARD, cap), -1, np.int64)
        for i in range(SHARD):
            for k in range(int(rng.integers(1, cap + 1))):
                w, h = rng.integers(8, 26, 2)
                x, y = rng.integers(0, size - w), rng.integers(0, size - h)
                cls = int(rng.integers(0, cfg["model"]["classes"]))
                boxes[i, k], labels[i, k] = (x, y, x + w, y + h), cls
                _draw(imgs[i], (x, y, x + w, y + h), cls, rng)
        np.savez(root / f"shard_{s // SHARD:03d}.npz", imgs=imgs.astype(np.float32), boxes=boxes, labels=labels)
    return root


class Shapes(Dataset):
    def __init__(self, root):
        shards = [np.load(p) for p in sorted(Path(root).glob("shard_*.npz"))]
        self.imgs, self.boxes, self.labels = (np.concatenate([s[k] for s in shards]) for k in ("imgs", "boxes", "labels"))

    def __len__(self):
        return len(self.imgs)

    def __getitem__(self, i):
        return torch.from_numpy(self.imgs[i]), torch.from_numpy(self.boxes[i]), torch.from_numpy(self.labels[i])
