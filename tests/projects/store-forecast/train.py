import argparse
import logging

import torch
import yaml

from forecast.sales import prepare
from forecast.stages import Stage


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="config.yaml")
    parser.add_argument("--only", help="run one stage by name")
    args = parser.parse_args()
    with open(args.config) as f:
        cfg = yaml.safe_load(f)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(cfg["seed"])
    sales = prepare(cfg["workdir"], cfg["data"], cfg["seed"])
    for stage in cfg["stages"]:
        if args.only in (None, stage["name"]):
            Stage(cfg, stage, sales).run()


if __name__ == "__main__":
    main()
