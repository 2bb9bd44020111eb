"""Semantic segmentation of synthetic shapes with the 'poly' learning-rate policy."""
import math
import os
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

CONFIG = {"classes": 3, "size": 24, "train_images": 100, "batch": 12, "epochs": 5,
          "base_lr": 0.05, "power": 0.9, "momentum": 0.9, "out": "seg_output"}


class Shapes(Dataset):
    def __init__(self, n, size, seed):
        self.n, self.size, self.seed = n, size, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng = np.random.default_rng(self.seed + i)
        label = np.zeros((self.size, self.size), dtype=np.int64)
        yy, xx = np.mgrid[:self.size, :self.size]
        cy, cx, r = rng.uniform(6, 18, 2).tolist() + [rng.uniform(3, 6)]
        label[(yy - cy) ** 2 + (xx - cx) ** 2 < r ** 2] = 1
        a, b = rng.integers(0, self.size - 8, 2)
        label[a:a + 5, b:b + 8] = 2
        image = np.stack([label == 1, label == 2, np.ones_like(label)]).astype(np.float32)
        image += 0.5 * rng.standard_normal(image.shape).astype(np.float32)
        return torch.from_numpy(image), torch.from_numpy(label)


class SmallUNet(nn.Module):
    def __init__(self, classes, ch=12):
        super().__init__()
        self.enc1 = self.block(3, ch)
        self.enc2 = self.block(ch, 2 * ch)
        self.dec = self.block(3 * ch, ch)
        self.out = nn.Conv2d(ch, classes, 1)

    @staticmethod
    def block(cin, cout):
        return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU())

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(F.max_pool2d(a, 2))
        up = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.out(self.dec(torch.cat([a, up], dim=1)))


def poly_policy(max_iter, power):
    def factor(it):
        return float(np.power(1 - it / max_iter, power))
    return factor


@torch.no_grad()
def mean_iou(model, loader, classes):
    model.eval()
    inter, union = torch.zeros(classes), torch.zeros(classes)
    for img, lab in loader:
        pred = model(img).argmax(1)
        for c in range(classes):
            inter[c] += ((pred == c) & (lab == c)).sum()
            union[c] += ((pred == c) | (lab == c)).sum()
    model.train()
    return (inter / union.clamp(min=1)).mean().item()


def main(cfg):
    torch.manual_seed(25)
    os.makedirs(cfg["out"], exist_ok=True)
    train = DataLoader(Shapes(cfg["train_images"], cfg["size"], 0), cfg["batch"], shuffle=True,
                       generator=torch.Generator().manual_seed(1))
    val = DataLoader(Shapes(20, cfg["size"], 9000), 10)
    model = SmallUNet(cfg["classes"])
    opt = torch.optim.SGD(model.parameters(), lr=cfg["base_lr"], momentum=cfg["momentum"], weight_decay=1e-4)
    max_iter = cfg["epochs"] * len(train)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, poly_policy(max_iter, cfg["power"]))
    weight = torch.tensor([0.5, 1.0, 1.0])
    it = 0
    for epoch in range(cfg["epochs"]):
        for img, lab in train:
            loss = F.cross_entropy(model(img), lab, weight=weight)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            print(f"step {it} loss {loss.item():.4f}")
            it += 1
        score = mean_iou(model, val, cfg["classes"])
        print(f"epoch {epoch} mIoU {score:.3f}", file=sys.stderr)
        if not math.isnan(score):
            torch.save(model.state_dict(), os.path.join(cfg["out"], f"epoch{epoch}.pt"))


if __name__ == "__main__":
    main(CONFIG)
