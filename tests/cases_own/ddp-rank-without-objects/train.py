"""Keypoint training on two workers (DistributedDataParallel, gloo); every worker has its own camera."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

WORLD, SLOTS, SIZE = 2, 6, 12


class KeypointNet(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, c, 3, 2, 1), nn.ReLU(), nn.Conv2d(c, c, 3, 2, 1), nn.ReLU())
        self.points = nn.Linear(c * 9, SLOTS * 2)
        self.present = nn.Linear(c * 9, SLOTS)

    def forward(self, img):
        h = self.features(img).flatten(1)
        return self.points(h).view(-1, SLOTS, 2), self.present(h)


def keypoint_loss(points, present, target, visible):
    """Position error of visible points, averaged over them, plus a presence term."""
    error = F.l1_loss(points, target, reduction="none").sum(-1)
    position = (error * visible).sum() / visible.sum()
    return position + F.binary_cross_entropy_with_logits(present, visible)


class Camera:
    def __init__(self, rank):
        self.g = torch.Generator().manual_seed(100 + rank)
        self.rank = rank

    def shot(self, step, n=4):
        visible = (torch.rand(n, SLOTS, generator=self.g) < 0.6).float()
        if self.rank == 1 and step == 13:
            visible[:] = 0.0  # lens covered
        target = torch.rand(n, SLOTS, 2, generator=self.g)
        img = 0.1 * torch.randn(n, 1, SIZE, SIZE, generator=self.g)
        for i in range(n):
            for k in range(SLOTS):
                if visible[i, k]:
                    r, c = (target[i, k] * (SIZE - 1)).long().tolist()
                    img[i, 0, r, c] += 1.0 + 0.2 * k
        return img, target, visible


def worker(rank, folder):
    torch.set_num_threads(1)
    torch.manual_seed(3)
    dist.init_process_group("gloo", init_method="file://" + os.path.join(folder, "sync"), rank=rank, world_size=WORLD)
    net = DistributedDataParallel(KeypointNet())
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
    camera = Camera(rank)
    for step in range(25):
        img, target, visible = camera.shot(step)
        points, present = net(img)
        loss = keypoint_loss(points, present, target, visible)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        mp.spawn(worker, args=(tmp,), nprocs=WORLD)
