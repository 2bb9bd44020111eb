import copy
import json
import logging
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from .averaging import BiasCorrectedEMA
from .grains import Grains, ramp_up

log = logging.getLogger("pollen")


def network(s):
    return nn.Sequential(nn.Linear(s.features, 48), nn.LayerNorm(48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, s.classes))


class Learner:
    def __init__(self, settings):
        self.s = settings
        self.student = network(settings)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()
        self.ema = BiasCorrectedEMA(self.student, settings.decay)
        self.optimizer = torch.optim.SGD(self.student.parameters(), **asdict(settings.optim))
        self.data = Grains(settings.classes, settings.features)
        self.path = Path(settings.out) / "last.pt"
        self.step = 0

    def begin(self):
        """Go on where the last job stopped, or start."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.ema.update(self.student)
            return
        state = torch.load(self.path, weights_only=False)
        self.student.load_state_dict(state["student"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ema.load_state_dict(state["ema"])
        self.data.g.set_state(state["rng"])
        self.step = state["step"]
        log.info("resumed at step %d", self.step)

    def save(self):
        torch.save({"student": self.student.state_dict(), "optimizer": self.optimizer.state_dict(), "ema": self.ema.state_dict(),
                    "rng": self.data.g.get_state(), "step": self.step}, self.path)

    def losses(self):
        x, y = self.data.draw(self.s.labelled)
        u, _ = self.data.draw(self.s.unlabelled)
        supervised = F.cross_entropy(self.student(self.data.jitter(x)), y)
        with torch.no_grad():
            wanted = self.teacher(self.data.jitter(u)).softmax(-1)
        consistency = (self.student(self.data.jitter(u)).softmax(-1) - wanted).square().sum(-1).mean()
        return supervised, consistency

    def advance(self):
        self.ema.write_to(self.teacher)
        supervised, consistency = self.losses()
        loss = supervised + self.s.weight * ramp_up(self.step, self.s.ramp) * consistency
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.ema.update(self.student)
        self.step += 1
        return {"step": self.step, "supervised": supervised.item(), "consistency": consistency.item()}

    @torch.no_grad()
    def accuracy(self):
        x, y = Grains(self.s.classes, self.s.features).draw(200)
        return (self.teacher(x).argmax(-1) == y).float().mean().item()

    def work(self, steps):
        with open(self.path.with_name("steps.jsonl"), "a") as f:
            for _ in range(steps):
                record = self.advance()
                f.write(json.dumps(record) + "\n")
                if record["step"] % 5 == 0:
                    log.info("step %(step)d supervised %(supervised).4f consistency %(consistency).4f", record)
        log.info("teacher accuracy %.3f", self.accuracy())
