"""Phase-contrast like images with three tissue classes (background, rim, body)."""
import os

import numpy as np
import torch
from torch.utils.data import Dataset


def make_image(size, rng):
    yy, xx = np.mgrid[:size, :size]
    img = 0.3 + 0.05 * rng.standard_normal((size, size))
    mask = np.zeros((size, size), np.int64)
    for _ in range(int(rng.integers(2, 6))):
        cx, cy = rng.uniform(4, size - 4, 2)
        r, squash = rng.uniform(3, 7), rng.uniform(0.7, 1.4)
        d = np.sqrt((xx - cx) ** 2 + squash * (yy - cy) ** 2)
        mask[d < r] = 2
        mask[(d >= r) & (d < r + 1.5) & (mask == 0)] = 1
        img = img + 0.5 * np.exp(-((d - r - 0.7) ** 2)) - 0.15 * (d < r)
    return img.astype(np.float32), mask


def prepare(folder, count, size, seed):
    index = os.path.join(folder, "index.txt")
    if os.path.exists(index):
        return index
    os.makedirs(folder, exist_ok=True)
    rng = np.random.default_rng(seed)
    with open(index, "w") as f:
        for i in range(count):
            img, mask = make_image(size, rng)
            path = os.path.join(folder, f"cell_{i:04d}.npz")
            np.savez_compressed(path, img=img, mask=mask)
            f.write(path + "\n")
    return index


class Cells(Dataset):
    def __init__(self, index, augment=True):
        self.paths = open(index).read().split()
        self.augment = augment

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        with np.load(self.paths[i]) as z:
            img, mask = torch.from_numpy(z["img"]), torch.from_numpy(z["mask"])
        if self.augment:
            k = int(torch.randint(4, ()))
            img, mask = img.rot90(k), mask.rot90(k)
        img = (img - img.mean()) / img.std()
        return img[None].contiguous(), mask.contiguous()
