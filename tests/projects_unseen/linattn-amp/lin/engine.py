import contextlib
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F


class Engine:
    """Gradient accumulation, autocast, warm-up, logs and checkpoints in one place."""

    def __init__(self, model, cfg, log_dir):
        self.cfg = cfg
        self.raw = model
        self.model = torch.compile(model, backend="eager") if cfg["compile"] else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], betas=(0.9, 0.98))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda s: min(1.0, (s + 1) / cfg["warmup"]))
        self.amp_dtype = getattr(torch, cfg["amp"]) if cfg["amp"] else None
        # the scaler is for the GPU only
        self.scaler = torch.amp.GradScaler("cuda", enabled=torch.cuda.is_available())
        self.log_dir = Path(log_dir)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.events = open(self.log_dir / "events.jsonl", "a")
        self.epoch = self.global_step = 0

    def autocast(self):
        if self.amp_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", dtype=self.amp_dtype)

    def step(self, batch):
        x, y = batch
        pieces = list(zip(x.split(self.cfg["micro_batch"]), y.split(self.cfg["micro_batch"])))
        total, hits = 0.0, 0
        for mx, my in pieces:
            with self.autocast():
                logits = self.model(mx)
            loss = F.cross_entropy(logits.float(), my) / len(pieces)
            self.scaler.scale(loss).backward()
            total += loss.item()
            hits += (logits.argmax(-1) == my).sum().item()
        self.scaler.unscale_(self.optimizer)
        gnorm = torch.nn.utils.clip_grad_norm_(self.raw.parameters(), self.cfg["clip"])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        stats = {"step": self.global_step, "loss": total, "acc": hits / len(y), "gnorm": gnorm.item(),
                 "lr": self.scheduler.get_last_lr()[0], "time": time.time()}
        self.events.write(json.dumps(stats) + "\n")
        self.global_step += 1
        return stats

    def end_epoch(self, epoch):
        self.events.flush()
        torch.save({"model": self.raw.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict(),
                    "epoch": epoch + 1, "step": self.global_step}, self.log_dir / f"epoch{epoch}.pt")

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.raw.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.global_step = state["epoch"], state["step"]
