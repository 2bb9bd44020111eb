"""Tide forecasts on several workers; gradients travel in half precision."""
import argparse

import torch.multiprocessing as mp

from tides.worker import work


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--harbours", type=int, default=320)
    parser.add_argument("--context", type=int, default=48)
    parser.add_argument("--horizon", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--no-compress", dest="compress", action="store_false")
    parser.add_argument("--port", type=int, default=29641)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--out", default="runs/tides")
    args = parser.parse_args()
    mp.spawn(work, (args,), nprocs=args.workers)


if __name__ == "__main__":
    main()
