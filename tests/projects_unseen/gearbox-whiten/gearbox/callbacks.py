import csv
from pathlib import Path

import torch


class Callback:
    def on_fit_start(self, trainer): ...
    def on_batch_end(self, trainer, loss): ...
    def on_epoch_end(self, trainer, valid): ...


class Warmup(Callback):
    def __init__(self, steps):
        self.steps = steps

    def on_fit_start(self, trainer):
        self.base = [g["lr"] for g in trainer.optimizer.param_groups]

    def on_batch_end(self, trainer, loss):
        scale = min(1.0, (trainer.step + 1) / self.steps)
        for g, lr in zip(trainer.optimizer.param_groups, self.base):
            g["lr"] = lr * scale


class CsvLogger(Callback):
    def __init__(self, out):
        self.path = Path(out) / "log.csv"

    def on_fit_start(self, trainer):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "w", newline="")
        self.rows = csv.writer(self.file)
        self.rows.writerow(["step", "loss"])

    def on_batch_end(self, trainer, loss):
        self.rows.writerow([trainer.step, loss])
        self.file.flush()


class Printer(Callback):
    def __init__(self, every):
        self.every = every

    def on_batch_end(self, trainer, loss):
        if trainer.step % self.every == 0:
            print(f"step {trainer.step} loss {loss:.4f} grad {trainer.grad_norm:.3f}")

    def on_epoch_end(self, trainer, valid):
        print(f"epoch {trainer.epoch} valid {valid:.4f}")


class Checkpoint(Callback):
    def __init__(self, out):
        self.path = Path(out) / "last.pt"

    def on_epoch_end(self, trainer, valid):
        torch.save({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict(),
                    "step": trainer.step, "epoch": trainer.epoch}, self.path)
