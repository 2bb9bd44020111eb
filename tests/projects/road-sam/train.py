import argparse
import logging
from pathlib import Path

import torch

from roads.model import SpeedNet
from roads.network import prepare
from roads.sam import SAM
from roads.trainer import Trainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/roads")
    parser.add_argument("--nodes", type=int, default=1500)
    parser.add_argument("--districts", type=int, default=144)
    parser.add_argument("--per-batch", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--rho", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[logging.FileHandler(out / "train.log"), logging.StreamHandler()])
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    graph = prepare(out / "cache", args.nodes, args.districts, args.seed)
    model = SpeedNet(graph["x"].shape[1])
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=args.rho, lr=args.lr, momentum=0.9)
    Trainer(model, optimizer, graph, out, args.per_batch, args.seed).fit(args.epochs)


if __name__ == "__main__":
    main()
