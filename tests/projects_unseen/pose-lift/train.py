"""Lifts 2D keypoints to joint rotations of a small kinematic chain."""
import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from pose.callbacks import Checkpoint, EMA, JsonlLogger, Validation
from pose.dataset import Clips, generate
from pose.losses import build_losses
from pose.model import Lifter
from pose.trainer import Trainer

ROOT = Path(__file__).resolve().parent


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--accumulate", type=int, default=2)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--losses", default="joints:1.0,rotation:0.5,smooth:0.01")
    ap.add_argument("--seed", type=int, default=21)
    args = ap.parse_args()

    torch.manual_seed(args.seed)
    data = ROOT / "clips"
    generate(data, seed=args.seed)
    train = DataLoader(Clips(data, "train"), args.batch, shuffle=False, drop_last=True)
    val = DataLoader(Clips(data, "val"), 32)

    model = Lifter()
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr=args.lr, total_steps=args.epochs * (len(train) // args.accumulate) + 1)
    run = ROOT / "run"
    ema = EMA(0.98)
    trainer = Trainer(model, opt, sched, build_losses(args.losses), accumulate=args.accumulate, clip=5.0,
                      callbacks=[ema, JsonlLogger(run / "log.jsonl"), Validation(val, ema), Checkpoint(run, ema)])
    trainer.fit(train, args.epochs)


if __name__ == "__main__":
    main()
