import json
from pathlib import Path

import torch
import torch.nn.functional as F

from . import store
from .clips import loader
from .model import SongNet


class Session:
    """One job in the queue: some epochs, then the job ends and the next one goes on from the file."""

    def __init__(self, args, data):
        self.args, self.data = args, data
        self.model = SongNet(args.species, args.stations)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.file = Path(args.out) / "last.pt"
        self.epoch = 0
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            self.epoch = store.resume(self.file, self.model, self.optimizer)
            print(f"resumed at epoch {self.epoch}")

    def step(self, wave, station, label):
        loss = F.cross_entropy(self.model(wave, station), label)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run(self):
        for _ in range(self.args.epochs_per_job):
            total = count = 0
            for wave, station, label in loader(self.data, self.args.batch, self.epoch, self.args.seed):
                total, count = total + self.step(wave, station, label), count + 1
            self.epoch += 1
            print(f"epoch {self.epoch} loss {total / count:.4f}", flush=True)
            with open(Path(self.args.out) / "log.jsonl", "a") as f:
                f.write(json.dumps({"epoch": self.epoch, "loss": total / count}) + "\n")
        store.save(self.file, self.model, self.optimizer, self.epoch)
