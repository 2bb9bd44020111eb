import argparse

import torch
import yaml
from torch.utils.data import DataLoader

from beetles.detector import Detector
from beetles.hooks import HOOKS
from beetles.runner import Runner
from beetles.trays import Trays, collate


def build(cfg):
    loader = DataLoader(Trays(**cfg["data"]), cfg["batch"], shuffle=True, drop_last=True, collate_fn=collate)
    hooks = [HOOKS[name](**options) for name, options in cfg["hooks"].items()]
    return Runner(Detector(), loader, cfg["optim"], cfg["weights"], hooks)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="configs/beetles.yaml")
    with open(parser.parse_args().config) as f:
        cfg = yaml.safe_load(f)
    torch.set_num_threads(1)
    torch.manual_seed(cfg["seed"])
    build(cfg).run(cfg["epochs"])


if __name__ == "__main__":
    main()
