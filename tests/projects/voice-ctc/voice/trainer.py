import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("voice")


class Trainer:
    def __init__(self, model, train_loader, dev_loader, out_dir, lr=2e-3, max_skips=5):
        self.model = model
        self.train_loader = train_loader
        self.dev_loader = dev_loader
        self.out_dir = Path(out_dir)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=1)
        self.writer = SummaryWriter(self.out_dir / "tb")
        self.max_skips = max_skips
        self.skipped = 0
        self.step = 0
        self.best = float("inf")

    def compute_loss(self, batch):
        log_probs, lens = self.model(batch["feats"], batch["feat_lens"])
        return F.ctc_loss(log_probs.transpose(0, 1), batch["labels"], lens, batch["label_lens"], zero_infinity=True)

    def train_step(self, batch):
        loss = self.compute_loss(batch)
        if not torch.isfinite(loss):
            self.skipped += 1
            log.warning("step %d: loss is %s, batch skipped (%d)", self.step, loss.item(), self.skipped)
            if self.skipped > self.max_skips:
                raise RuntimeError("too many bad batches")
            return None
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def train_epoch(self, epoch):
        self.model.train()
        total, count = 0.0, 0
        for batch in self.train_loader:
            value = self.train_step(batch)
            if value is None:
                continue
            total, count = total + value, count + 1
            self.writer.add_scalar("train/loss", value, self.step)
            if self.step % 5 == 0:
                log.info("step %d loss %.4f", self.step, value)
        return total / max(count, 1)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        losses = [self.compute_loss(batch).item() for batch in self.dev_loader]
        return sum(losses) / len(losses)

    def fit(self, epochs):
        for epoch in range(epochs):
            train_loss = self.train_epoch(epoch)
            dev_loss = self.evaluate()
            self.scheduler.step(dev_loss)
            self.writer.add_scalar("dev/loss", dev_loss, self.step)
            log.info("epoch %d train %.4f dev %.4f", epoch, train_loss, dev_loss)
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch}
            torch.save(state, self.out_dir / "last.pt")
            if dev_loss < self.best:
                self.best = dev_loss
                torch.save(state, self.out_dir / "best.pt")
        self.writer.close()
