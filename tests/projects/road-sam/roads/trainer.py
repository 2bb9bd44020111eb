import csv
import logging
from pathlib import Path

import torch

from .model import masked_mse
from .network import subgraph

log = logging.getLogger("roads")


class Trainer:
    def __init__(self, model, optimizer, graph, out, per_batch, seed):
        self.model, self.optimizer, self.graph = model, optimizer, graph
        self.out = Path(out)
        self.per_batch = per_batch
        self.rng = torch.Generator().manual_seed(seed)
        ids = torch.unique(graph["district"])
        self.held_out = ids[::6]
        self.train_ids = ids[~torch.isin(ids, self.held_out)]
        self.global_step = 0

    def loss(self, part):
        return masked_mse(self.model(part["x"], part["edges"]), part["y"], part["sensor"])

    def train_step(self, part):
        loss = self.loss(part)
        loss.backward()

        def second_pass():
            again = self.loss(part)
            again.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
            return again

        self.optimizer.step(second_pass)
        self.global_step += 1
        return loss.item()

    def train_epoch(self):
        self.model.train()
        order = self.train_ids[torch.randperm(len(self.train_ids), generator=self.rng)]
        losses = []
        for group in order.split(self.per_batch):
            losses.append(self.train_step(subgraph(self.graph, group)))
        return sum(losses) / len(losses)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        return self.loss(subgraph(self.graph, self.held_out)).item()

    def fit(self, epochs):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer.base, epochs)
        with open(self.out / "history.csv", "w", newline="") as f:
            rows = csv.writer(f)
            rows.writerow(["epoch", "step", "train", "val"])
            for epoch in range(epochs):
                train, val = self.train_epoch(), self.evaluate()
                schedule.step()
                rows.writerow([epoch, self.global_step, train, val])
                log.info("epoch %d step %d train %.4f val %.4f", epoch, self.global_step, train, val)
                torch.save({"model": self.model.state_dict(), "base": self.optimizer.base.state_dict(), "epoch": epoch}, self.out / "latest.pt")
