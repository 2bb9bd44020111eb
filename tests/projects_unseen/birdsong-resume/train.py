"""Bird song classifier, trained in jobs of a few epochs each.

    python train.py [--jobs N] [--out DIR]
"""
import argparse

import torch

from songs.clips import prepare
from songs.session import Session


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default="out")
    p.add_argument("--data", default="clips")
    p.add_argument("--species", type=int, default=5)
    p.add_argument("--per-species", type=int, default=48)
    p.add_argument("--stations", type=int, default=40)
    p.add_argument("--batch", type=int, default=24)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--jobs", type=int, default=3)
    p.add_argument("--epochs-per-job", type=int, default=2)
    p.add_argument("--seed", type=int, default=5)
    args = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data = prepare(args.data, args.species, args.per_species, args.stations, args.seed)
    for _ in range(args.jobs):
        Session(args, data).run()


if __name__ == "__main__":
    main()
