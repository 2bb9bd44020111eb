import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader


def scaled_lr(cfg):
    """Linear scaling rule: the rate grows with the effective batch."""
    return cfg["base_lr"] * cfg["batch_size"] * cfg["accumulate"] / 32


class Trainer:
    def __init__(self, model, train_set, test_set, cfg, out):
        self.model, self.cfg = model, cfg
        self.out = Path(out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.train_loader = DataLoader(train_set, cfg["batch_size"], shuffle=True, drop_last=True, num_workers=cfg["num_workers"],
                                       persistent_workers=cfg["num_workers"] > 0)
        self.test_loader = DataLoader(test_set, 512)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=scaled_lr(cfg), momentum=cfg["momentum"], weight_decay=cfg["weight_decay"])
        total = cfg["epochs"] * len(self.train_loader) // cfg["accumulate"]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: self.warmup_cosine(s, total))
        self.step = 0
        self.log = open(self.out / "log.jsonl", "w")

    def warmup_cosine(self, step, total):
        warm = self.cfg["warmup_steps"]
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, total - warm))))

    def train_epoch(self, epoch):
        self.model.train()
        window = 0.0
        for i, (x, y) in enumerate(self.train_loader):
            loss = F.mse_loss(self.model(x), y) / self.cfg["accumulate"]
            loss.backward()
            window += loss.item()
            if (i + 1) % self.cfg["accumulate"] == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.record(epoch, window)
                window = 0.0
                self.step += 1
        self.optimizer.zero_grad()

    def record(self, epoch, loss):
        row = {"epoch": epoch, "step": self.step, "loss": loss, "lr": self.scheduler.get_last_lr()[0]}
        self.log.write(json.dumps(row) + "\n")
        if self.step % self.cfg["log_every"] == 0:
            print(f"epoch {epoch} step {self.step} loss {loss:.4f} lr {row['lr']:.4f}", flush=True)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        error = sum(F.mse_loss(self.model(x), y, reduction="sum").item() for x, y in self.test_loader)
        return error / len(self.test_loader.dataset)

    def fit(self):
        best = math.inf
        for epoch in range(self.cfg["epochs"]):
            self.train_epoch(epoch)
            error = self.evaluate()
            print(f"epoch {epoch} test mse {error:.4f}", flush=True)
            if error < best:
                best = error
                torch.save({"model": self.model.state_dict(), "epoch": epoch, "mse": error}, self.out / "best.pt")
        self.log.close()
