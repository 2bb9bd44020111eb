"""Learned pair potential for small noble-gas clusters: energies and forces (torch.func), sizes grow with the curriculum."""
import argparse
from functools import partial
from pathlib import Path

import torch

from forcefield.clusters import batches, prepare
from forcefield.fit import Fitter
from forcefield.losses import LOSSES
from forcefield.potential import PairPotential


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="runs/ff")
    ap.add_argument("--data", default="clusters.pt")
    ap.add_argument("--loss", choices=sorted(LOSSES), default="huber")
    ap.add_argument("--force-weight", type=float, default=2.0)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(8)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    data = prepare(args.data)
    model = PairPotential()
    loss_fn = partial(LOSSES[args.loss], force_weight=args.force_weight)
    fitter = Fitter(model, loss_fn, args.lr, out)
    if args.resume:
        fitter.resume()
    for stage, sizes in enumerate([(6,), (5, 6), (4, 5, 6)]):
        fitter.run_stage(stage, batches(data, sizes, batch=12, steps=30, seed=stage))


if __name__ == "__main__":
    main()
