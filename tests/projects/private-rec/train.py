import argparse
import csv
import os

import numpy as np
import torch

from catalogue import VOCAB, bag_of_words, prepare
from private import PrivateMomentum, make_example_grads
from towers import TwoTower, unit


def hit_rate(model, params, bags, clicks, k=30):
    """Share of held-out clicks among the user's k best items."""
    with torch.no_grad():
        items = unit(torch.func.functional_call(model.item, {n[5:]: p for n, p in params.items() if n.startswith("item.")}, (bags,)))
        users = unit(params["user.weight"][torch.from_numpy(clicks[:, 0])])
        top = torch.nan_to_num(users @ items.T).topk(k, dim=1).indices
        return (top == torch.from_numpy(clicks[:, 1])[:, None]).any(1).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description="Two-tower recommender trained with DP-SGD")
    parser.add_argument("--data", default="data")
    parser.add_argument("--out", default="runs/rec")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--negatives", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--sigma", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    os.makedirs(args.out, exist_ok=True)
    items, clicks = prepare(args.data, seed=args.seed)
    bags = torch.from_numpy(bag_of_words(items))
    test, train = clicks[:200], clicks[200:]
    popularity = np.bincount(train[:, 1], minlength=len(items)) ** 0.75
    popularity = popularity / popularity.sum()

    model = TwoTower(users=int(clicks[:, 0].max()) + 1, vocab=len(VOCAB))
    params = {k: v.detach() for k, v in model.named_parameters()}
    example_grads = make_example_grads(model)
    optimizer = PrivateMomentum(params, args.lr, 0.9, args.sigma, 1.0, torch.Generator().manual_seed(args.seed))
    sampler = np.random.default_rng(args.seed)

    with open(os.path.join(args.out, "log.csv"), "w", newline="") as f:
        log = csv.writer(f)
        log.writerow(["step", "loss", "median_norm"])
        for step in range(args.steps):
            rows = train[sampler.integers(0, len(train), args.batch)]
            drawn = sampler.choice(len(items), size=(args.batch, args.negatives), p=popularity)
            candidates = np.concatenate([rows[:, 1:], drawn], axis=1)
            grads, losses = example_grads(params, torch.from_numpy(rows[:, 0]), bags[torch.from_numpy(candidates)])
            params, norms = optimizer.update(params, grads, args.batch)
            log.writerow([step, losses.mean().item(), norms.median().item()])
            if step % 10 == 0:
                print(f"step {step} loss {losses.mean().item():.4f} grad {norms.median().item():.3f}", flush=True)
            if (step + 1) % 50 == 0:
                print(f"hit rate {hit_rate(model, params, bags, test):.3f}")
                torch.save({"params": params, "optimizer": optimizer.state_dict(), "step": step + 1}, os.path.join(args.out, "last.pt"))


if __name__ == "__main__":
    main()
