import logging
from pathlib import Path

import torch
import torch.nn.functional as F

log = logging.getLogger("eeg")


class OnlineLearner:
    def __init__(self, net, lr, out, save_every=40):
        self.net = net
        self.opt = torch.optim.Adam([
            {"params": net.temporal.parameters(), "lr": lr / 5},
            {"params": net.head.parameters(), "lr": lr}])
        self.out, self.save_every = Path(out), save_every
        self.step = self.skipped = 0
        self.running = 0.5

    def learn(self, x, y):
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        if not torch.isfinite(loss):
            self.skipped += 1
            log.warning("step %d: bad loss, batch skipped (%d so far)", self.step, self.skipped)
            self.step += 1
            return
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        acc = (logits.argmax(1) == y).float().mean().item()
        self.running = 0.9 * self.running + 0.1 * acc
        if self.step % 10 == 0:
            log.info("step %d loss %.4f accuracy %.3f", self.step, loss.item(), self.running)
        self.step += 1
        if self.step % self.save_every == 0:
            torch.save({"net": self.net.state_dict(), "opt": self.opt.state_dict(), "step": self.step},
                       self.out / f"online_{self.step:04d}.pt")
