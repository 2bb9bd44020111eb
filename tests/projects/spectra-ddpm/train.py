import argparse
from pathlib import Path

import numpy as np
import torch

from spectra.data import LENGTH, load
from spectra.loop import sample, train
from spectra.schedule import Diffusion
from spectra.unet import UNet1d


def main():
    parser = argparse.ArgumentParser(description="Diffusion model of Raman spectra")
    parser.add_argument("--out", default="runs/spectra")
    parser.add_argument("--data", default="data")
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--timesteps", type=int, default=500)
    parser.add_argument("--gamma", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--ema", type=float, default=0.98)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data, stats = load(args.data, args.n, args.seed)
    model = UNet1d()
    diffusion = Diffusion(args.timesteps, args.gamma)
    ema = train(model, diffusion, data, args)
    made = sample(ema, diffusion, 8, LENGTH, args.seed) * stats["std"] + stats["mean"]
    np.save(Path(args.out) / "samples.npy", made.numpy())


if __name__ == "__main__":
    main()
