import csv
from pathlib import Path

import torch

from .dynamics import rollout


def learn(field, segments, curriculum, cfg):
    out = Path(cfg.out)
    compiled = torch.compile(field, backend="aot_eager")
    opt = torch.optim.Adam(field.parameters(), lr=cfg.lr)
    fh = (out / "learn.csv").open("w", newline="")
    writer = csv.writer(fh)
    writer.writerow(["step", "length", "stride", "loss", "grad_norm"])
    for step in range(cfg.steps):
        length, stride = curriculum.at(step)
        seg = segments.draw(length, stride)

        def closure():
            opt.zero_grad()
            pred = rollout(compiled, seg[:, 0], length, cfg.dt * stride)
            loss = (pred - seg).abs().mean()
            loss.backward()
            return loss

        loss = opt.step(closure)
        norm = sum(p.grad.square().sum() for p in field.parameters()).sqrt()
        writer.writerow([step, length, stride, loss.item(), norm.item()])
        fh.flush()
        if step % 10 == 0:
            print(f"{step:4d} length {length:3d} x {stride} loss {loss.item():.4f}", flush=True)
        if (step + 1) % cfg.save_every == 0:
            torch.save({"field": field.state_dict(), "opt": opt.state_dict(), "step": step}, out / "last.pt")
    fh.close()
