import json
from contextlib import contextmanager
from time import perf_counter

import torch


@contextmanager
def timed(record, key):
    start = perf_counter()
    yield
    record[key] = round(perf_counter() - start, 4)


class Fitter:
    def __init__(self, model, loss_fn, lr, out):
        self.model, self.loss_fn, self.out = model, loss_fn, out
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.997)
        self.step = 0

    def resume(self):
        state = torch.load(self.out / "fit.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def train_step(self, pos, mask, energy_ref, force_ref):
        energy, force = self.model.energy_and_forces(pos, mask)
        loss = self.loss_fn(energy, force, energy_ref, force_ref, mask)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def run_stage(self, stage, source):
        with open(self.out / "fit.jsonl", "a") as log:
            for batch in source:
                record = {"stage": stage, "step": self.step}
                with timed(record, "seconds"):
                    record["loss"] = self.train_step(*batch)
                log.write(json.dumps(record) + "\n")
                if self.step % 10 == 0:
                    print(f"stage {stage} step {self.step} loss {record['loss']:.4f}")
                self.step += 1
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step},
                   self.out / "fit.pt")
        print(f"stage {stage} done")
