import argparse
import logging
import os

import torch

from spd.layers import TangentNet
from spd.online import OnlineLearner
from spd.sessions import make_loader


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--sessions", type=int, default=10)
    ap.add_argument("--trials", type=int, default=192)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=13)
    ap.add_argument("--out", default="eeg_out")
    args = ap.parse_args()
    os.makedirs(args.out, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s",
                        handlers=[logging.StreamHandler(), logging.FileHandler(f"{args.out}/online.log", "w")])
    torch.manual_seed(args.seed)
    learner = OnlineLearner(TangentNet(), args.lr, args.out)
    for x, y in make_loader(args.sessions, args.trials, args.batch, args.seed):
        learner.learn(x, y)
    torch.save(learner.net.state_dict(), f"{args.out}/final.pt")


if __name__ == "__main__":
    main()
