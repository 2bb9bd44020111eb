import math
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from .net import Forecaster
from .windows import split


class TrainingDiverged(RuntimeError):
    pass


def train_main(settings, queue):
    """Target of the child process."""
    try:
        fit(settings, queue)
    finally:
        queue.put(None)


def validate(model, loader, criterion):
    model.eval()
    with torch.no_grad():
        losses = [criterion(model(x), y).item() for x, y in loader]
    model.train()
    return sum(losses) / len(losses)


def fit(settings, queue):
    torch.set_num_threads(1)
    out = Path(settings.root) / settings.out
    os.makedirs(out, exist_ok=True)
    train_set, val_set = split(Path(settings.root) / settings.data, settings.window, settings.horizon)
    loader = DataLoader(train_set, settings.batch_size, shuffle=True, num_workers=settings.workers)
    val_loader = DataLoader(val_set, 64)

    model = Forecaster(3, settings.hidden, settings.horizon)
    criterion = torch.nn.HuberLoss()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=settings.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    step, best = 0, math.inf
    with open(out / "train.log", "a") as log:
        for epoch in range(settings.epochs):
            running = 0.0
            for past, future in loader:
                pred = model(past)
                loss = criterion(pred, future)
                value = loss.item()
                log.write(f"{step}\t{value}\n")
                print(f"step {step} loss {value:.4f}", flush=True)
                if not math.isfinite(value):
                    raise TrainingDiverged(f"loss {value} in step {step}, try a smaller learning rate")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                running += value
                step += 1
            val = validate(model, val_loader, criterion)
            plateau.step(val)
            if val < best:
                best = val
                torch.save({"model": model.state_dict(), "mean": train_set.mean.tolist(),
                            "std": train_set.std.tolist()}, out / "best.pt")
            queue.put({"epoch": epoch, "train": running / len(loader), "val": val})
