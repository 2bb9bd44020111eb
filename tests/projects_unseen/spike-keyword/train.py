"""Keyword spotting with a small spiking network (cochleagram events -> 4 words)."""
import argparse
import functools
import json
import random
from pathlib import Path

import numpy as np
import torch

from spikes.data import build_loaders, ensure_dataset
from spikes.loop import evaluate, run_epoch, train_step
from spikes.model import SpikingNet

ROOT = Path(__file__).resolve().parent


def load_config():
    ap = argparse.ArgumentParser()
    ap.add_argument("--config", default=str(ROOT / "config.json"))
    ap.add_argument("--epochs", type=int, default=None)
    args = ap.parse_args()
    cfg = json.loads(Path(args.config).read_text())
    if args.epochs is not None:
        cfg["optim"]["epochs"] = args.epochs
    return cfg


def main():
    cfg = load_config()
    random.seed(cfg["seed"])
    np.random.seed(cfg["seed"])
    torch.manual_seed(cfg["seed"])

    data_dir = ROOT / cfg["data"]["dir"]
    ensure_dataset(data_dir, cfg["data"], seed=cfg["seed"])
    train_loader, val_loader = build_loaders(data_dir, cfg["data"])

    m = cfg["model"]
    model = SpikingNet(cfg["data"]["channels"], m["hidden"], m["classes"],
                       beta=m["beta"], threshold=m["threshold"], slope=m["slope"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["optim"]["lr"],
                                  weight_decay=cfg["optim"]["weight_decay"])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=cfg["optim"]["epochs"] * len(train_loader))

    out = ROOT / cfg["out"]
    out.mkdir(parents=True, exist_ok=True)
    step_fn = functools.partial(train_step, model, optimizer, scheduler)

    start_epoch, step = 0, 0
    ckpt = out / "last.pt"
    if ckpt.exists():
        state = torch.load(ckpt, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start_epoch, step = state["epoch"] + 1, state["step"]
        print(f"resumed from epoch {state['epoch']}")

    with open(out / "log.jsonl", "a") as log:
        for epoch in range(start_epoch, cfg["optim"]["epochs"]):
            step = run_epoch(train_loader, step_fn, step, log)
            acc = evaluate(model, val_loader)
            print(f"epoch {epoch} val acc {acc:.3f}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "epoch": epoch, "step": step}, ckpt)


if __name__ == "__main__":
    main()
