"""Binary segmentation of cell images, everything by hand: no torch.optim, no DataLoader."""
import argparse
import csv
import logging
import sys
from pathlib import Path

import torch

from seg.data import ImageFolder, iterate, write_images
from seg.net import init_params, predict, segmentation_loss
from seg.sgd import MomentumSGD, PolyRate

log = logging.getLogger("seg")


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--data", type=Path, default=Path("cells"))
    p.add_argument("--out", type=Path, default=Path("experiment"))
    p.add_argument("--images", type=int, default=100)
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--momentum", type=float, default=0.9)
    p.add_argument("--power", type=float, default=0.9)
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--fresh", action="store_true", help="ignore an earlier checkpoint")
    return p.parse_args()


def iou(params, images, masks):
    with torch.no_grad():
        pred = predict(params, images) > 0
    inter = (pred & (masks > 0.5)).sum().item()
    union = (pred | (masks > 0.5)).sum().item()
    return inter / max(union, 1)


def save(path, params, opt, epoch, it):
    torch.save({"params": {k: v.detach() for k, v in params.items()},
                "velocity": opt.velocity, "epoch": epoch, "it": it}, path)


def main():
    args = parse_args()
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    torch.manual_seed(args.seed)
    write_images(args.data, args.images, args.seed)
    train, val = ImageFolder(args.data / "train"), ImageFolder(args.data / "val")

    params = init_params(channels=8)
    iters_per_epoch = -(-len(train) // args.batch_size)  # the last, smaller batch counts too
    rate = PolyRate(args.lr, max_iters=args.epochs * iters_per_epoch, power=args.power)
    opt = MomentumSGD(params, args.momentum)

    args.out.mkdir(parents=True, exist_ok=True)
    ckpt = args.out / "checkpoint.pt"
    first_epoch = it = 0
    if ckpt.exists() and not args.fresh:
        state = torch.load(ckpt, weights_only=True)
        opt.load(params, state)
        first_epoch, it = state["epoch"] + 1, state["it"]
        log.info("resume at epoch %d", first_epoch)

    best = 0.0
    with open(args.out / "history.csv", "a", newline="") as f:
        history = csv.writer(f)
        for epoch in range(first_epoch, args.epochs):
            for images, masks in iterate(train, args.batch_size):
                loss = segmentation_loss(predict(params, images), masks)
                loss.backward()
                lr = rate(it)
                opt.update(lr)
                log.info("step %d loss %.4f lr %.5f", it, loss.item(), lr)
                it += 1
            score = iou(params, *val.all())
            history.writerow([epoch, it, loss.item(), lr, score])
            f.flush()
            log.info("epoch %d val iou %.3f", epoch, score)
            save(ckpt, params, opt, epoch, it)
            if score > best:
                best = score
                save(args.out / "best.pt", params, opt, epoch, it)


if __name__ == "__main__":
    main()
