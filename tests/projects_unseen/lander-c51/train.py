"""Categorical DQN (C51) on a small vertical-landing task.

    python train.py                      # 800 environment steps
    python train.py --resume runs/c51/last.pt
"""
import argparse
import random

import numpy as np
import torch

from lander.agent import Agent
from lander.config import Config
from lander.env import Lander
from lander.runner import Runner


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default="runs/c51")
    p.add_argument("--env-steps", type=int, default=800)
    p.add_argument("--resume")
    p.add_argument("--seed", type=int, default=5)
    return p.parse_args()


def main():
    args = parse()
    torch.set_num_threads(1)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    cfg = Config(env_steps=args.env_steps)
    agent = Agent(cfg)
    runner = Runner(cfg, Lander(cfg.max_len, seed=args.seed), agent, args.out)
    if args.resume:
        runner.restore(args.resume)
    runner.run()


if __name__ == "__main__":
    main()
