import argparse
import sys

import torch
import yaml

from feeder.series import chunks, write_series
from feeder.ssm import StateSpace
from feeder.streaming import StreamTrainer


def cli():
    ap = argparse.ArgumentParser(description="streaming state-space model of a distribution feeder")
    ap.add_argument("config", nargs="?", default="configs/feeder.yaml")
    ap.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    ap.add_argument("--resume", action="store_true")
    return ap.parse_args()


def main():
    args = cli()
    with open(args.config) as f:
        cfg = yaml.safe_load(f)
    for item in args.set:
        key, value = item.split("=", 1)
        cfg[key] = yaml.safe_load(value)
    torch.set_num_threads(1)
    torch.manual_seed(cfg["seed"])
    write_series(cfg["series"], cfg["hours"], cfg["seed"])
    model = StateSpace(inputs=3, state=cfg["state"], outputs=1)
    trainer = StreamTrainer(model, cfg)
    start = trainer.restore() if args.resume else 0
    for number, chunk in enumerate(chunks(cfg["series"], cfg["chunk"])):
        if number >= start:
            trainer.consume(number, chunk)
    print("series finished", file=sys.stderr)


if __name__ == "__main__":
    main()
