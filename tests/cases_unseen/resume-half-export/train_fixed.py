"""Apartment prices. The run is cut into two jobs by the time limit of the cluster; the second resumes from the first.
Checkpoints are written in half precision because the quota is small."""
import logging
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
WORK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "work_dir")
log = logging.getLogger("prices")


def apartments(n, g):
    x = torch.randn(n, 6, generator=g)
    price = 310_000 + 92_000 * x[:, 0] + 41_000 * torch.tanh(x[:, 1] * x[:, 2]) + 15_000 * torch.randn(n, generator=g)
    return x, price


class Standardizer(nn.Module):
    """Keeps mean and spread of the target so that the network works on unit scale."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    @torch.no_grad()
    def fit(self, y):
        self.mean.copy_(y.mean())
        self.std.copy_(y.std())

    def forward(self, y):
        return (y - self.mean) / self.std


class PriceNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.target = Standardizer()
        self.body = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.body(x).squeeze(1)

    def loss(self, x, price):
        return F.smooth_l1_loss(self(x), self.target(price))


def shrink(state):
    return {k: v.half() if torch.is_floating_point(v) and v.abs().max() < 6e4 else v for k, v in state.items()}


def save_checkpoint(path, model, opt, step):
    torch.save({"model": shrink(model.state_dict()), "lr": opt.param_groups[0]["lr"], "step": step}, path)
    log.info("saved %s at step %d", path, step)


def load_checkpoint(path, model, opt):
    ckpt = torch.load(path, weights_only=True)
    model.load_state_dict(ckpt["model"])
    for group in opt.param_groups:
        group["lr"] = ckpt["lr"]
    return ckpt["step"]


def job(resume, steps, seed):
    """One job on the cluster."""
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(100 + seed)
    path = os.path.join(WORK, "latest.pt")
    model = PriceNet()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    start = 0
    if resume:
        start = load_checkpoint(path, model, opt)
        log.info("resumed at step %d", start)
    else:
        model.target.fit(apartments(512, g)[1])
    for step in range(start, start + steps):
        x, price = apartments(32, g)
        loss = model.loss(x, price)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")
    save_checkpoint(path, model, opt, start + steps)


def main():
    os.makedirs(WORK, exist_ok=True)
    logging.basicConfig(filename=os.path.join(WORK, "log.txt"), filemode="w", level=logging.INFO)
    job(resume=False, steps=25, seed=0)
    job(resume=True, steps=15, seed=1)


if __name__ == "__main__":
    main()
