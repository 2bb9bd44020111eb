import argparse

import torch
import yaml

from house.model import PriceNet
from house.table import load
from house.trainer import Trainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="config.yaml")
    args = parser.parse_args()
    with open(args.config) as f:
        cfg = yaml.safe_load(f)
    torch.set_num_threads(1)
    train_set, test_set = load(cfg["data"])
    features = train_set[0][0].numel()
    model = PriceNet(features, **cfg["model"])
    Trainer(model, train_set, test_set, cfg["train"], cfg["out"]).fit()


if __name__ == "__main__":
    main()
