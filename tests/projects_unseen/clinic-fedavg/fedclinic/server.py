import json
import logging
import random

import torch

from .client import Client
from .cohort import COLUMNS
from .model import WeibullAFT

log = logging.getLogger("fedclinic.server")


def average(states, sizes):
    total = float(sum(sizes))
    return {k: sum(n / total * s[k] for s, n in zip(states, sizes)) for k in states[0]}


class Server:
    def __init__(self, sites, out, per_round, seed):
        self.model = WeibullAFT(len(COLUMNS))
        self.clients = [Client(name, data) for name, data in sites.items()]
        self.per_round, self.out = per_round, out
        self.rng = random.Random(seed)

    def round(self, number):
        chosen = self.rng.sample(self.clients, self.per_round)
        states, losses = zip(*(c.fit(self.model) for c in chosen))
        self.model.load_state_dict(average(states, [len(c) for c in chosen]))
        names = [c.name for c in chosen]
        log.info("round %d %s losses %s", number, names, ["%.4f" % v for v in losses])
        with open(self.out / "rounds.jsonl", "a") as f:
            f.write(json.dumps({"round": number, "clients": names, "losses": losses}) + "\n")
        if not all(torch.isfinite(p).all() for p in self.model.parameters()):
            return False
        torch.save(self.model.state_dict(), self.out / f"global_{number:03d}.pt")
        return True

    @torch.no_grad()
    def score(self):
        good = total = 0
        for c in self.clients:
            order = self.model(c.x)
            later = c.years[:, None] < c.years[None, :]
            usable = later & (c.event[:, None] > 0)
            good += (usable & (order[:, None] < order[None, :])).sum().item()
            total += usable.sum().item()
        return good / max(total, 1)
