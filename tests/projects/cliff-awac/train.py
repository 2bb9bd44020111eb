import argparse
import csv
import os

import numpy as np
import torch

from awac import AWAC
from buffer import ReplayBuffer
from env import Bridge, collect


@torch.no_grad()
def evaluate(agent, seed, episodes=5):
    env, returns = Bridge(np.random.default_rng(seed)), []
    for _ in range(episodes):
        obs, done, total = env.reset(), False, 0.0
        while not done:
            action = agent.actor(torch.from_numpy(obs)).mean.nan_to_num()
            obs, rew, done = env.step(action.numpy())
            total += rew
        returns.append(total)
    return float(np.mean(returns))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/awac")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--updates", type=int, default=240)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lam", type=float, default=0.1)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    buffer = ReplayBuffer(collect(os.path.join(args.out, "dataset"), args.episodes, args.seed), args.seed)
    agent = AWAC(3, 2, lam=args.lam)
    print(f"{len(buffer)} transitions")
    with open(os.path.join(args.out, "progress.csv"), "w", newline="") as f:
        table = csv.DictWriter(f, ["update", "critic", "actor"])
        table.writeheader()
        for update in range(args.updates):
            info = agent.update(buffer.sample(args.batch))
            table.writerow({"update": update, **info})
            if update % 10 == 0:
                print(f"update {update} critic {info['critic']:.4f} actor {info['actor']:.4f}", flush=True)
            if (update + 1) % args.eval_every == 0:
                print(f"return {evaluate(agent, args.seed):.2f}", flush=True)
                torch.save(agent.state_dict(), os.path.join(args.out, "agent.pt"))


if __name__ == "__main__":
    main()
