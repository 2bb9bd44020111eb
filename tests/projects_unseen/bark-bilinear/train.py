import argparse
import os

import torch

from texture.model import BCNN
from texture.runner import Runner, Settings
from texture.surfaces import CLASSES, Surfaces

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 48, 64])
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--out", default="runs")
    args = parser.parse_args()

    s = Settings(sizes=tuple(args.sizes), lr=args.lr, out=args.out, classes=CLASSES)
    os.makedirs(s.out, exist_ok=True)
    torch.manual_seed(s.seed)
    train, test = Surfaces(s.n_train, s.seed), Surfaces(s.n_test, s.seed + 1)
    Runner(BCNN(len(CLASSES)), train, test, s).run()
