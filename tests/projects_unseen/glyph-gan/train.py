import argparse
import pathlib

import torch

from glyphgan import glyphs
from glyphgan.engine import Engine
from glyphgan.nets import Discriminator, Generator


def get_args():
    p = argparse.ArgumentParser("glyph GAN")
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    p.add_argument("--iters", type=int, default=140)
    p.add_argument("--batch", type=int, default=10)
    p.add_argument("--lr-g", type=float, default=4e-4)
    p.add_argument("--lr-d", type=float, default=3e-3)
    p.add_argument("--sample-every", type=int, default=50)
    p.add_argument("--resume", action="store_true")
    p.add_argument("--seed", type=int, default=1)
    return p.parse_args()


def main():
    args = get_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.out.mkdir(exist_ok=True)
    engine = Engine(Generator(), Discriminator(), args)
    if args.resume and (args.out / "gan.pt").exists():
        engine.load(args.out / "gan.pt")
    engine.loop(glyphs.stream(args.batch, args.seed))


if __name__ == "__main__":
    main()
