import csv
import logging
from pathlib import Path

import torch

from .likelihood import concordance, weibull_nll

log = logging.getLogger("aft")


class RollingTrainer:
    """Updates the model month by month, as the registry grows."""

    def __init__(self, model, registry, cfg):
        self.model, self.registry, self.cfg = model, registry, cfg
        self.opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=cfg["weight_decay"])
        self.gen = torch.Generator().manual_seed(cfg["seed"])
        self.out = Path(cfg["out"])
        self.updates = 0

    def update(self, x, days, died):
        scale, shape = self.model(x)
        loss = weibull_nll(scale, shape, days, died)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.updates += 1
        return loss.item()

    def evaluate(self, month):
        self.model.eval()
        idx = self.registry.window(month, 1)
        with torch.no_grad():
            scale, shape = self.model(self.registry.x[idx])
            nll = weibull_nll(scale, shape, self.registry.days[idx], self.registry.died[idx])
        ci = concordance(scale, self.registry.days[idx], self.registry.died[idx])
        self.model.train()
        return nll.item(), ci

    def run(self):
        cfg = self.cfg
        with (self.out / "months.csv").open("w", newline="") as fh:
            writer = csv.writer(fh)
            writer.writerow(["month", "updates", "train_nll", "next_nll", "c_index"])
            for month in range(cfg["months"] - 1):
                losses = [self.update(*b) for b in self.registry.batches(
                    month, cfg["window"], cfg["batch_size"], cfg["steps_per_month"], self.gen)]
                nll, ci = self.evaluate(month + 1)
                writer.writerow([month, self.updates, sum(losses) / len(losses), nll, ci])
                log.info("month %2d  train %.4f  next month %.4f  c-index %.3f",
                         month, sum(losses) / len(losses), nll, ci)
                if month % 6 == 5:
                    torch.save({"model": self.model.state_dict(), "opt": self.opt.state_dict(), "month": month},
                               self.out / f"month_{month:02d}.pt")
