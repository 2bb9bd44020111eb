"""Self-distillation (DINO style) on satellite tiles in mixed precision.

    python train.py [--steps N] [--out DIR] [--resume]
"""
import argparse
import json
from pathlib import Path

import torch

from tiles.archive import TileStream, prepare
from tiles.distill import Distiller
from tiles.networks import TextureNet
from tiles.loop import run


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=48)
    ap.add_argument("--accumulate", type=int, default=2)
    ap.add_argument("--out", type=Path, default=Path("runs/dino"))
    ap.add_argument("--archive", type=Path, default=Path("archive"))
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--seed", type=int, default=14)
    args = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "args.json").write_text(json.dumps({k: str(v) for k, v in vars(args).items()}))
    prepare(args.archive)
    run(Distiller(TextureNet), TileStream(args.archive, batch=8, seed=args.seed), args)


if __name__ == "__main__":
    main()
