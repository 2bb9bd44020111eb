import copy
import json
from pathlib import Path

import torch


class EMA:
    def __init__(self, decay):
        self.decay = decay
        self.shadow = None

    def on_start(self, trainer):
        self.shadow = copy.deepcopy(trainer.model).requires_grad_(False).eval()

    @torch.no_grad()
    def on_step(self, trainer, loss, parts):
        for s, p in zip(self.shadow.parameters(), trainer.model.parameters()):
            s.lerp_(p, 1 - self.decay)


class JsonlLogger:
    def __init__(self, path):
        self.path = Path(path)

    def on_start(self, trainer):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "w")

    def on_step(self, trainer, loss, parts):
        self.file.write(json.dumps({"step": trainer.global_step, "loss": loss, **parts}) + "\n")
        self.file.flush()
        print(f"step {trainer.global_step} loss {loss:.4f}")


class Validation:
    def __init__(self, loader, ema):
        self.loader, self.ema = loader, ema

    @torch.no_grad()
    def on_epoch(self, trainer, epoch):
        errs = [(self.ema.shadow(b["keypoints"], b["visible"])["joints"] - b["joints"]).norm(dim=-1).mean().item()
                for b in self.loader]
        print(f"epoch {epoch} val mpjpe {sum(errs) / len(errs):.4f}")


class Checkpoint:
    def __init__(self, folder, ema):
        self.folder, self.ema = Path(folder), ema

    def on_epoch(self, trainer, epoch):
        torch.save({"model": trainer.model.state_dict(), "ema": self.ema.shadow.state_dict(),
                    "optimizer": trainer.optimizer.state_dict(), "scheduler": trainer.scheduler.state_dict(),
                    "step": trainer.global_step, "epoch": epoch}, self.folder / f"ckpt_{epoch}.pt")
