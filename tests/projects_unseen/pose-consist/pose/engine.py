import json
import math
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from .rotations import geodesic


class Callback:
    def on_epoch_start(self, engine): ...
    def on_step_end(self, engine): ...
    def on_epoch_end(self, engine): ...


class AnnealAugment(Callback):
    def on_epoch_start(self, engine):
        engine.augment.set_epoch(engine.epoch)


class JsonLog(Callback):
    def __init__(self, path):
        self.fh = open(path, "w")

    def on_step_end(self, engine):
        if engine.step % 5 == 0:
            self.fh.write(json.dumps({"step": engine.step, **engine.last}) + "\n")
            self.fh.flush()


class Checkpoint(Callback):
    def __init__(self, folder):
        self.folder = Path(folder)
        self.best = math.inf

    def on_epoch_end(self, engine):
        state = {"net": engine.net.state_dict(), "epoch": engine.epoch, "val": engine.val}
        torch.save(state, self.folder / "last.pt")
        if engine.val < self.best:
            self.best = engine.val
            torch.save(state, self.folder / "best.pt")


class Engine:
    def __init__(self, net, train_set, val_set, augment, args, callbacks):
        self.net, self.augment, self.args, self.callbacks = net, augment, args, callbacks
        self.loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
        self.val_loader = DataLoader(val_set, args.batch_size)
        self.opt = torch.optim.Adam(net.parameters(), lr=args.lr)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(
            self.opt, args.lr, total_steps=args.epochs * len(self.loader))
        self.step, self.epoch, self.last, self.val = 0, 0, {}, math.inf

    def fire(self, name):
        for cb in self.callbacks:
            getattr(cb, name)(self)

    def train_step(self, points, target):
        one = self.net(self.augment(points))
        two = self.net(self.augment(points))
        sup = (one - target).square().sum(dim=(1, 2)).mean() + (two - target).square().sum(dim=(1, 2)).mean()
        agree = geodesic(one, two).mean()
        loss = sup + self.args.agree_weight * agree
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        self.sched.step()
        return {"loss": loss.item(), "sup": sup.item(), "agree": agree.item()}

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        err = torch.cat([geodesic(self.net(p), r) for p, r in self.val_loader])
        self.net.train()
        return math.degrees(err.median().item())

    def fit(self):
        for self.epoch in range(self.args.epochs):
            self.fire("on_epoch_start")
            for points, target in self.loader:
                self.last = self.train_step(points, target)
                self.fire("on_step_end")
                self.step += 1
            self.val = self.validate()
            print(f"epoch {self.epoch}: loss {self.last['loss']:.4f}, median error {self.val:.2f} deg")
            self.fire("on_epoch_end")
