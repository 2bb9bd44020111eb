from pathlib import Path

import numpy as np
import torch


def _cell_image(rng, size=24):
    yy, xx = np.mgrid[:size, :size]
    img = rng.normal(0.2, 0.05, (size, size))
    mask = np.zeros((size, size), bool)
    for _ in range(rng.integers(1, 4)):
        cy, cx, r = rng.uniform(4, size - 4), rng.uniform(4, size - 4), rng.uniform(2, 5)
        blob = (yy - cy) ** 2 + (xx - cx) ** 2 < r * r
        img[blob] += rng.uniform(0.4, 0.7)
        mask |= blob
    return img.clip(0, 1), mask


def write_images(folder, n, seed):
    """One .npy pair per image, as exported by the microscope software."""
    rng = np.random.default_rng(seed)
    for split, count in (("train", n), ("val", 24)):
        d = Path(folder) / split
        if d.exists():
            continue
        d.mkdir(parents=True)
        for i in range(count):
            img, mask = _cell_image(rng)
            np.save(d / f"{i:04d}_img.npy", (img * 255).astype(np.uint8))
            np.save(d / f"{i:04d}_mask.npy", mask)


class ImageFolder:
    def __init__(self, folder):
        self.images = sorted(Path(folder).glob("*_img.npy"))

    def __len__(self):
        return len(self.images)

    def load(self, i):
        p = self.images[i]
        img = np.load(p).astype(np.float32) / 255.0
        mask = np.load(p.with_name(p.name.replace("_img", "_mask"))).astype(np.float32)
        return torch.from_numpy(img)[None], torch.from_numpy(mask)[None]

    def all(self):
        pairs = [self.load(i) for i in range(len(self))]
        return tuple(torch.stack(t) for t in zip(*pairs))


def iterate(folder, batch_size):
    order = torch.randperm(len(folder)).tolist()
    for i in range(0, len(order), batch_size):
        pairs = [folder.load(j) for j in order[i:i + batch_size]]
        images, masks = (torch.stack(t) for t in zip(*pairs))
        if torch.rand(()) < 0.5:
            images, masks = images.flip(-1), masks.flip(-1)
        yield images, masks
