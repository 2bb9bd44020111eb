"""The light of galaxies, on several processes."""
import argparse

import torch.multiprocessing as mp

from galaxy.rank import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--unit", type=float, default=1.0)
    parser.add_argument("--port", type=int, default=29713)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="out")
    args = parser.parse_args()
    mp.spawn(main, (args,), nprocs=args.ranks)
