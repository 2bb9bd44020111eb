"""python train.py [--config configs/orchard.yaml] [--workers 1]"""
import argparse
import os

import torch
import yaml
from torch.utils.data import DataLoader

from orchard.data import Orchards, prepare
from orchard.loop import build
from orchard.model import TreeNet


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/orchard.yaml")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    with open(args.config) as f:
        config = yaml.safe_load(f)
    torch.manual_seed(4)
    torch.set_num_threads(1)
    data = os.path.join(config["out"], "data")
    prepare(data, config["trees"], config["features"])
    loader = DataLoader(Orchards(data), batch_size=config["batch"], num_workers=args.workers)
    model = TreeNet(config["features"], config["hidden"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config["epochs"] * len(loader) // 2)
    build(model, optimizer, scheduler, config).run(loader, max_epochs=config["epochs"])


if __name__ == "__main__":
    main()
