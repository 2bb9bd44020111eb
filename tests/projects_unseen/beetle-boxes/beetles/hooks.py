import json
from pathlib import Path

import torch


class Hook:
    def after_step(self, runner): ...
    def after_epoch(self, runner): ...


class StepDecay(Hook):
    """Multiplies the rate at the milestones."""

    def __init__(self, milestones, gamma):
        self.milestones, self.gamma = set(milestones), gamma

    def after_epoch(self, runner):
        if runner.epoch in self.milestones:
            for group in runner.optimizer.param_groups:
                group["lr"] *= self.gamma


class Log(Hook):
    def __init__(self, folder, every):
        self.folder, self.every = Path(folder), every
        self.folder.mkdir(parents=True, exist_ok=True)

    def after_step(self, runner):
        row = {"step": runner.step, "lr": runner.optimizer.param_groups[0]["lr"], **runner.losses}
        with open(self.folder / "log.jsonl", "a") as f:
            f.write(json.dumps(row) + "\n")
        if runner.step % self.every == 0:
            print(" ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)


class Best(Hook):
    """Keeps the best weights by the loss over the epoch."""

    def __init__(self, folder):
        self.folder, self.best = Path(folder), float("inf")

    def after_epoch(self, runner):
        if runner.epoch_loss < self.best:
            self.best = runner.epoch_loss
            torch.save(runner.model.state_dict(), self.folder / "best.pt")


HOOKS = {"decay": StepDecay, "log": Log, "best": Best}
