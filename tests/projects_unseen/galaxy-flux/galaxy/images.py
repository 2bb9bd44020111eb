import torch
from torch.utils.data import IterableDataset


class Sky(IterableDataset):
    """Cut-outs of galaxies in counts of the detector; every rank has its own part of the sky."""

    def __init__(self, rank, count, size, seed):
        self.g = torch.Generator().manual_seed(seed * 10 + rank)
        self.count, self.size = count, size

    def __iter__(self):
        axis = torch.linspace(-1, 1, self.size)
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        for i in range(self.count):
            width = 0.15 + 0.25 * torch.rand((), generator=self.g)
            light = 120 * torch.exp(-(x ** 2 + y ** 2) / (2 * width ** 2))
            exposure = 1 + 3 * i / self.count  # longer and longer in the course of the night
            image = exposure * (light + 2 + torch.randn(self.size, self.size, generator=self.g))
            yield image.unsqueeze(0), exposure * light.sum()
