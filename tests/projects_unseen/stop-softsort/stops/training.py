import csv
import functools
from contextlib import contextmanager
from pathlib import Path

import torch


def every(n):
    """Calls the method only at every n-th step."""
    def deco(fn):
        @functools.wraps(fn)
        def wrapper(self, *args, **kwargs):
            if self.step % n == 0:
                return fn(self, *args, **kwargs)
        return wrapper
    return deco


@contextmanager
def evaluating(model):
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        model.train(was)


class Experiment:
    def __init__(self, model, source, schedule, workdir):
        self.model, self.source, self.schedule = model, source, schedule
        self.workdir = Path(workdir)
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
        self.generator = torch.Generator().manual_seed(3)
        self.held_out = source(64, torch.Generator().manual_seed(4))
        self.step = 0

    def loss(self, x, order):
        p = self.model(x)
        picked = p.gather(2, order.unsqueeze(2)).squeeze(2)
        return -(picked + 1e-6).log().mean()

    def advance(self):
        self.model.sort.tau = self.schedule(self.step)
        loss = self.loss(*self.source(16, self.generator))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @every(10)
    def report(self, loss):
        print(f"step {self.step} loss {loss:.4f} tau {self.model.sort.tau:.3f}", flush=True)
        self.rows.writerow([self.step, loss, self.model.sort.tau])

    @every(40)
    def evaluate(self):
        x, order = self.held_out
        with evaluating(self.model) as m:
            exact = (m(x).argmax(-1) == order).float().mean()
        print(f"  held out: {exact:.3f} of positions right")
        self.save()

    def save(self):
        torch.save({"model": self.model.state_dict(), "opt": self.optimizer.state_dict(), "step": self.step},
                   self.workdir / "ranker.pt")

    def load(self):
        s = torch.load(self.workdir / "ranker.pt")
        self.model.load_state_dict(s["model"])
        self.optimizer.load_state_dict(s["opt"])
        self.step = s["step"]

    def train(self, steps):
        with open(self.workdir / "log.csv", "a", newline="") as f:
            self.rows = csv.writer(f)
            while self.step < steps:
                self.report(self.advance())
                self.evaluate()
                self.step += 1
