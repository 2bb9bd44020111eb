import csv
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from .schedule import PolyLR


def split_params(model, lr_mult, weight_decay):
    head = [p for n, p in model.named_parameters() if n.startswith("head")]
    norm = [p for n, p in model.named_parameters() if not n.startswith("head") and p.ndim == 1]
    rest = [p for n, p in model.named_parameters() if not n.startswith("head") and p.ndim > 1]
    return [{"params": rest, "weight_decay": weight_decay}, {"params": norm, "weight_decay": 0.0},
            {"params": head, "lr_mult": lr_mult}]


class Trainer:
    def __init__(self, model, train_set, val_set, cfg):
        t = cfg["train"]
        self.model, self.cfg = model, cfg
        bs = cfg["loader"]["batch_size"]
        self.train_loader = DataLoader(train_set, bs, shuffle=True, num_workers=cfg["loader"]["workers"],
                                       persistent_workers=True)
        self.val_loader = DataLoader(val_set, bs)
        self.optimizer = torch.optim.SGD(split_params(model, 2.0, t["weight_decay"]), lr=t["base_lr"],
                                         momentum=t["momentum"])
        iters_per_epoch = len(self.train_loader)
        self.schedule = PolyLR(self.optimizer, t["base_lr"], t["epochs"] * iters_per_epoch, t["power"])
        self.out = Path(cfg["out"])
        self.it = 0

    def train_epoch(self, writer):
        self.model.train()
        for x, y in self.train_loader:
            lr = self.schedule(self.it)
            loss = F.cross_entropy(self.model(x), y)
            if not torch.isfinite(loss):
                print(f"iteration {self.it}: loss is {loss.item()}, stopping training")
                sys.exit(1)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            writer.writerow([self.it, f"{lr:.6f}", f"{loss.item():.5f}"])
            self.it += 1

    @torch.no_grad()
    def miou(self):
        self.model.eval()
        k = self.cfg["data"]["classes"]
        conf = torch.zeros(k, k, dtype=torch.long)
        for x, y in self.val_loader:
            pred = self.model(x).argmax(1)
            conf += torch.bincount((y * k + pred).flatten(), minlength=k * k).view(k, k)
        inter = conf.diag().double()
        return (inter / (conf.sum(0) + conf.sum(1) - inter).clamp(min=1)).mean().item()

    def run(self):
        with (self.out / "iters.csv").open("w", newline="") as fh:
            writer = csv.writer(fh)
            writer.writerow(["it", "lr", "loss"])
            for epoch in range(self.cfg["train"]["epochs"]):
                self.train_epoch(writer)
                score = self.miou()
                print(f"epoch {epoch}: mIoU {score:.3f}", flush=True)
                torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                            "epoch": epoch, "it": self.it}, self.out / f"epoch_{epoch}.pth")
