import json
import logging
from pathlib import Path

import torch
import torch.nn.functional as F

from .quant import set_mode

log = logging.getLogger("micq")


class Pipeline:
    def __init__(self, cfg, model, train, test):
        self.cfg, self.model, self.train, self.test = cfg, model, train, test
        self.out = Path(cfg.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.log_file = open(self.out / "log.jsonl", "a")
        self.step = 0

    def _update(self, x, y, optimizer):
        loss = F.cross_entropy(self.model(x), y, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def _epochs(self, count, lr, tag):
        optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=count * len(self.train))
        for epoch in range(count):
            for x, y in self.train:
                loss = self._update(x, y, optimizer)
                schedule.step()
                if self.step % 5 == 0:
                    log.info("%s step %d loss %.4f", tag, self.step, loss)
                self.log_file.write(json.dumps({"phase": tag, "step": self.step, "loss": loss}) + "\n")
                self.step += 1
            log.info("%s epoch %d accuracy %.3f", tag, epoch, self.accuracy())
            torch.save(self.model.state_dict(), self.out / f"{tag}.pt")

    @torch.no_grad()
    def accuracy(self):
        self.model.eval()
        hits = torch.cat([self.model(x).argmax(-1) == y for x, y in self.test])
        self.model.train()
        return hits.float().mean().item()

    @torch.no_grad()
    def calibrate(self):
        set_mode(self.model, "calibrate")
        for i, (x, _) in enumerate(self.test):
            if i >= self.cfg.calibration_batches:
                break
            self.model(x)

    def float_phase(self):
        self._epochs(self.cfg.float_epochs, self.cfg.lr, "float")

    def qat_phase(self):
        self.calibrate()
        set_mode(self.model, "quantise")
        self._epochs(self.cfg.qat_epochs, self.cfg.qat_lr, "qat")
