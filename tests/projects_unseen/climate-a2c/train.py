import argparse
import os

import torch

from rl.a2c import A2C
from rl.agent import Agent
from rl.room import Rooms

parser = argparse.ArgumentParser()
parser.add_argument("--envs", type=int, default=16)
parser.add_argument("--horizon", type=int, default=16)
parser.add_argument("--iterations", type=int, default=150)
parser.add_argument("--gamma", type=float, default=0.97)
parser.add_argument("--entropy", type=float, default=0.01)
parser.add_argument("--lr", type=float, default=7e-4)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", default="results")


def main():
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(args.seed)
    env = Rooms(args.envs, args.seed)
    A2C(env, Agent(env.obs_dim, env.actions), args).learn()


if __name__ == "__main__":
    main()
