import json
import math
import sys

import torch
import torch.nn.functional as F


def train_step(model, optimizer, scheduler, batch):
    """One update; returns what goes into the log."""
    x, y = batch
    model.train()
    optimizer.zero_grad(set_to_none=True)
    logits, rate = model(x)
    loss = F.cross_entropy(logits, y) + 0.5 * (rate - 0.1) ** 2
    loss.backward()
    optimizer.step()
    scheduler.step()
    return {"loss": loss.item(), "rate": rate.item(), "lr": scheduler.get_last_lr()[0],
            "acc": (logits.argmax(1) == y).float().mean().item()}


def run_epoch(loader, step_fn, step, log):
    for batch in loader:
        metrics = step_fn(batch)
        if not math.isfinite(metrics["loss"]):
            print(f"step {step} loss {metrics['loss']}: giving up", file=sys.stderr)
            sys.exit(1)
        log.write(json.dumps({"step": step, **metrics}) + "\n")
        log.flush()
        print(f"step {step} loss {metrics['loss']:.4f} rate {metrics['rate']:.3f}")
        step += 1
    return step


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hits = total = 0
    for x, y in loader:
        logits, _ = model(x)
        hits += (logits.argmax(1) == y).sum().item()
        total += len(y)
    return hits / total
