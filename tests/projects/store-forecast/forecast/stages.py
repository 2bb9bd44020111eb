import json
import logging
from pathlib import Path

import torch
import torch.nn.functional as F

from . import checkpoints
from .model import Forecaster
from .sales import Windows, select

log = logging.getLogger("forecast")


class Stage:
    def __init__(self, cfg, stage, sales):
        self.cfg, self.stage = cfg, stage
        self.folder = Path(cfg["workdir"]) / "checkpoints"
        self.model = Forecaster(len(sales), cfg["data"]["horizon"], **cfg["model"])
        self.model.scaler.fit(sales)
        self.step = 0
        last = checkpoints.newest(self.folder)
        if last is not None:
            self.step = checkpoints.restore(last, self.model)
            log.info("%s: continuing from %s", stage["name"], last.name)
        self.windows = Windows(sales, select(sales, stage["stores"]), cfg["data"]["context"], cfg["data"]["horizon"],
                               cfg["batch_size"], cfg["seed"] + self.step)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=stage["lr"])
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.2, total_iters=stage["steps"])

    def loss(self, store, context, future):
        z = self.model(store, context)
        if self.stage["loss"] == "normalised":
            return F.smooth_l1_loss(z, self.model.scaler.scale(future, store))
        money = self.model.scaler.unscale(z, store)
        return ((money - future).abs() / future).mean()

    def train_step(self):
        loss = self.loss(*self.windows.draw())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        return loss.item()

    def run(self):
        with open(Path(self.cfg["workdir"]) / "metrics.jsonl", "a") as f:
            for _ in range(self.stage["steps"]):
                value = self.train_step()
                f.write(json.dumps({"stage": self.stage["name"], "step": self.step, "loss": value}) + "\n")
                if self.step % self.cfg["log_every"] == 0:
                    log.info("%s step %d loss %.4f", self.stage["name"], self.step, value)
                if self.step % self.cfg["ckpt_every"] == 0:
                    checkpoints.save(self.folder, self.stage["name"], self.step, self.model)
