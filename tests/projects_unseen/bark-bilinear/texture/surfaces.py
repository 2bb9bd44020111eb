import math

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

CLASSES = ["stripe", "ring", "grain", "check"]


def render(kind, size, g):
    axis = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(axis, axis, indexing="ij")
    f = 6 + 6 * torch.rand((), generator=g)
    th = math.pi * torch.rand((), generator=g)
    u, v = xx * th.cos() + yy * th.sin(), yy * th.cos() - xx * th.sin()
    if kind == 0:
        img = torch.sin(f * u)
    elif kind == 1:
        img = torch.sin(f * (u * u + v * v))
    elif kind == 2:
        img = torch.randn(size, size, generator=g).clamp(-2, 2) / 2
    else:
        img = torch.sign(torch.sin(f * u) * torch.sin(f * v))
    img = img + 0.1 * torch.randn(size, size, generator=g)
    tint = 0.6 + 0.4 * torch.rand(3, 1, 1, generator=g)
    return ((img * 0.5 + 0.5) * tint * 255).clamp(0, 255).to(torch.uint8)


class Surfaces(Dataset):
    def __init__(self, n, seed, full=96):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(len(CLASSES), (n,), generator=g)
        self.images = torch.stack([render(int(k), full, g) for k in self.labels])
        self.size = full

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        img = self.images[i].float() / 255
        if self.size != img.shape[-1]:
            img = F.interpolate(img[None], size=self.size, mode="area")[0]
        return (img - 0.45) / 0.22, self.labels[i]


def loader(dataset, size, batch, seed):
    dataset.size = size
    g = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, batch, shuffle=True, drop_last=True, generator=g)
