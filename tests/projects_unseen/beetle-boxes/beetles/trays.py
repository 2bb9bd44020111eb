"""Museum trays with pinned beetles: 24 x 24 grey images and boxes."""
import numpy as np
import torch
from torch.utils.data import Dataset


class Trays(Dataset):
    SIZE = 24

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.images = rng.normal(0.8, 0.03, (count, 1, self.SIZE, self.SIZE)).astype(np.float32)
        self.boxes = []
        yy, xx = np.mgrid[: self.SIZE, : self.SIZE] + 0.5
        for image in self.images:
            boxes = []
            for _ in range(int(rng.integers(1, 4))):
                cx, cy = rng.uniform(4, self.SIZE - 4, 2)
                rx, ry = rng.uniform(1.5, 4, 2)
                image[0][((xx - cx) / rx) ** 2 + ((yy - cy) / ry) ** 2 < 1] = rng.uniform(0.05, 0.3)
                boxes.append([cx - rx, cy - ry, cx + rx, cy + ry])
            self.boxes.append(torch.tensor(boxes, dtype=torch.float32))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return torch.from_numpy(self.images[i]), self.boxes[i]


def collate(rows):
    images, boxes = zip(*rows)
    return torch.stack(images), list(boxes)
