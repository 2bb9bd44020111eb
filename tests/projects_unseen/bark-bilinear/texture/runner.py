import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.utils.tensorboard import SummaryWriter

from .surfaces import loader


@dataclass
class Settings:
    sizes: tuple = (32, 48, 64)
    epochs_per_size: int = 2
    batch: int = 8
    lr: float = 0.02
    n_train: int = 96
    n_test: int = 32
    seed: int = 21
    init_scale: float = 256.0
    out: str = "runs"
    classes: list = field(default_factory=list)


class Runner:
    """Progressive resizing with mixed precision."""

    def __init__(self, model, train, test, s: Settings):
        self.model, self.train_set, self.test_set, self.s = model, train, test, s
        self.opt = torch.optim.SGD(model.parameters(), lr=s.lr, momentum=0.9, nesterov=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=s.init_scale, growth_interval=1000)
        self.writer = SummaryWriter(s.out + "/tb")
        self.step = 0

    def one_batch(self, x, y):
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(x)
        loss = F.cross_entropy(logits.float(), y, label_smoothing=0.05)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.writer.add_scalar("train/loss", loss.item(), self.step)
        self.writer.add_scalar("train/scale", self.scaler.get_scale(), self.step)
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def accuracy(self, size):
        self.model.eval()
        hits = total = 0
        for x, y in loader(self.test_set, size, 16, 0):
            hits += (self.model(x).argmax(1) == y).sum().item()
            total += len(y)
        self.model.train()
        return hits / total

    def run(self):
        for stage, size in enumerate(self.s.sizes):
            for epoch in range(self.s.epochs_per_size):
                start = time.time()
                batches = loader(self.train_set, size, self.s.batch, self.s.seed + 10 * stage + epoch)
                losses = [self.one_batch(x, y) for x, y in batches]
                acc = self.accuracy(size)
                self.writer.add_scalar("test/acc", acc, self.step)
                print(f"[{size}px] epoch {epoch} loss {sum(losses) / len(losses):.4f} acc {acc:.3f} "
                      f"({time.time() - start:.1f}s)", flush=True)
            torch.save({"model": self.model.state_dict(), "scaler": self.scaler.state_dict(), "size": size},
                       f"{self.s.out}/stage{stage}.pt")
        self.writer.close()
