import csv
from pathlib import Path

import torch
import torch.nn.functional as F


class StreamTrainer:
    """Truncated back-propagation: the state goes on from chunk to chunk, the graph does not."""

    def __init__(self, model, cfg):
        self.model, self.cfg = model, cfg
        ssm = [model.log_rate, model.B]
        rest = [p for n, p in model.named_parameters() if n not in ("log_rate", "B")]
        self.optimizer = torch.optim.AdamW([{"params": ssm, "lr": cfg["ssm_lr"], "weight_decay": 0.0}, {"params": rest}], lr=cfg["lr"])
        self.h = model.initial()
        self.out = Path(cfg["out"])
        self.out.mkdir(exist_ok=True)
        self.average = None

    def restore(self):
        state = torch.load(self.out / "stream.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.h = state["h"]
        return state["next"]

    def save(self, number):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "h": self.h, "next": number + 1},
                   self.out / "stream.pt")

    def consume(self, number, chunk):
        dt, u, y = chunk
        pred, h = self.model(dt, u, self.h)
        loss = F.smooth_l1_loss(pred, y, beta=0.1)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"chunk {number}: loss is {loss.item()}")
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg["clip"])
        self.optimizer.step()
        self.h = h.detach()
        value = loss.item()
        self.average = value if self.average is None else 0.9 * self.average + 0.1 * value
        with open(self.out / "loss.csv", "a", newline="") as f:
            csv.writer(f).writerow([number, value, float(self.h.norm())])
        if number % 5 == 0:
            print(f"chunk {number} loss {value:.5f} average {self.average:.5f} |h| {self.h.norm():.2f}", flush=True)
        if number % self.cfg["save_every"] == self.cfg["save_every"] - 1:
            self.save(number)
