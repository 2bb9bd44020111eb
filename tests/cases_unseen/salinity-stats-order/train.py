"""Salinity from CTD casts. The second leg of the cruise continues from the first leg's files."""
import json
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)
torch.set_num_threads(1)
RUN = "runs/leg1"


def casts(n, rng):
    x = rng.normal(size=(n, 6)).astype(np.float32) * [2.0, 30.0, 0.5, 8.0, 1.0, 0.0] + [4.0, 120.0, 7.9, 15.0, 33.0, 0.0]
    y = 0.02 * x[:, 1] + np.sin(x[:, 0]) + 0.3 * x[:, 4]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


class Scaler:
    """Zero mean and unit variance; a channel that never moves is left alone."""

    def fit(self, x):
        std = x.std(0)
        self.mean, self.std = x.mean(0), torch.where(std > 0, std, torch.ones_like(std))
        return self

    def save(self, path):
        with open(path, "w") as f:
            json.dump([self.std.tolist(), self.mean.tolist()], f)

    def load(self, path):
        with open(path) as f:
            self.mean, self.std = (torch.tensor(v) for v in json.load(f))
        return self

    def __call__(self, x):
        return (x - self.mean) / self.std


def build():
    model = nn.Sequential(nn.Linear(6, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def leg(model, opt, scaler, steps, start, rng, log):
    for step in range(start, start + steps):
        x, y = casts(64, rng)
        loss = F.smooth_l1_loss(model(scaler(x)).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.write(f"{step},{loss.item()}\n")
        print(f"step {step} loss {loss.item():.4f}")


def main():
    os.makedirs(RUN, exist_ok=True)
    rng = np.random.default_rng(7)
    model, opt = build()
    scaler = Scaler().fit(casts(2000, rng)[0])
    with open(f"{RUN}/loss.csv", "a") as log:
        leg(model, opt, scaler, 40, 0, rng, log)
        scaler.save(f"{RUN}/scaler.json")
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": 40}, f"{RUN}/last.pt")

        model, opt = build()
        state = torch.load(f"{RUN}/last.pt")
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        leg(model, opt, Scaler().load(f"{RUN}/scaler.json"), 20, state["step"], rng, log)


if __name__ == "__main__":
    main()
