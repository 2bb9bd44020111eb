import argparse
from pathlib import Path

import torch

from pose.clouds import Augment, PoseClouds
from pose.engine import AnnealAugment, Checkpoint, Engine, JsonLog
from pose.net import PointPose


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--agree-weight", type=float, default=0.5)
    p.add_argument("--jitter", type=float, default=0.03)
    p.add_argument("--drop", type=float, default=0.2)
    p.add_argument("--augment-epochs", type=int, default=7)
    p.add_argument("--items", type=int, default=640)
    p.add_argument("--points", type=int, default=96)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--out", type=Path, default=Path("out"))
    return p.parse_args()


if __name__ == "__main__":
    args = parse()
    torch.manual_seed(args.seed)
    args.out.mkdir(exist_ok=True)
    engine = Engine(
        PointPose(),
        PoseClouds(args.items, args.points, args.seed),
        PoseClouds(128, args.points, args.seed + 1),
        Augment(args.jitter, args.drop, args.augment_epochs),
        args,
        [AnnealAugment(), JsonLog(args.out / "log.jsonl"), Checkpoint(args.out)])
    engine.fit()
