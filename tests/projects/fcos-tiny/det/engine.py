import copy
import csv
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from .losses import fcos_losses


class EMA:
    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


def cycle(loader):
    while True:
        yield from loader


def build_scheduler(opt, cfg):
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=cfg["warmup"])
    main = torch.optim.lr_scheduler.MultiStepLR(opt, [m - cfg["warmup"] for m in cfg["milestones"]])
    return torch.optim.lr_scheduler.SequentialLR(opt, [warm, main], [cfg["warmup"]])


def run(model, dataset, cfg):
    out = Path(cfg["out_dir"])
    out.mkdir(parents=True, exist_ok=True)
    oc = cfg["optim"]
    loader = DataLoader(dataset, oc["batch_size"], shuffle=True, drop_last=True)
    opt = torch.optim.SGD(model.parameters(), lr=oc["lr"], momentum=oc["momentum"], weight_decay=oc["weight_decay"])
    scheduler = build_scheduler(opt, oc)
    ema = EMA(model, cfg["ema"])
    with open(out / "metrics.csv", "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["step", "lr", "cls", "ctr", "box"])
        for step, (img, boxes, labels) in zip(range(oc["steps"]), cycle(loader)):
            losses = fcos_losses(model(img), boxes, labels)
            total = sum(losses.values())
            if not torch.isfinite(total):
                raise FloatingPointError(f"loss became {total.item()} at step {step}: " + str({k: v.item() for k, v in losses.items()}))
            opt.zero_grad(set_to_none=True)
            total.backward()
            opt.step()
            scheduler.step()
            ema.update(model)
            writer.writerow([step, scheduler.get_last_lr()[0]] + [f"{v.item():.5f}" for v in losses.values()])
            if step % cfg["log_every"] == 0:
                print(f"step {step} loss {total.item():.4f}", flush=True)
            if (step + 1) % cfg["ckpt_every"] == 0:
                torch.save({"model": model.state_dict(), "ema": ema.model.state_dict(), "opt": opt.state_dict(), "step": step}, out / f"step{step + 1:05d}.pt")
