import argparse

import torch
import yaml

from det.engine import run
from det.model import FCOS
from det.shapes import Shapes, prepare


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="config.yaml")
    parser.add_argument("--out-dir")
    args = parser.parse_args()
    with open(args.config) as f:
        cfg = yaml.safe_load(f)
    if args.out_dir:
        cfg["out_dir"] = args.out_dir
    torch.set_num_threads(1)
    torch.manual_seed(cfg["seed"])
    dataset = Shapes(prepare(cfg))
    model = FCOS(**cfg["model"])
    run(model, dataset, cfg)


if __name__ == "__main__":
    main()
