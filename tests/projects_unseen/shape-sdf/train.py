import argparse
import logging
from dataclasses import fields
from pathlib import Path

import torch

from sdf.field import Field
from sdf.fit import fit
from sdf.options import Options
from sdf.shapes import Sampler


def main():
    parser = argparse.ArgumentParser()
    for f in fields(Options):
        parser.add_argument("--" + f.name.replace("_", "-"), type=f.type, default=f.default)
    opt = Options(**vars(parser.parse_args()))
    Path(opt.out).mkdir(exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s",
                        handlers=[logging.StreamHandler(), logging.FileHandler(Path(opt.out) / "fit.log", "w")])
    torch.manual_seed(opt.seed)
    field = Field(opt.hidden, opt.layers, opt.truncation)
    ema = fit(field, Sampler(opt), opt)
    axis = torch.linspace(-0.6, 0.6, 24)
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3)
    with torch.no_grad():
        torch.save(ema(grid).view(24, 24, 24), Path(opt.out) / "volume.pt")


if __name__ == "__main__":
    main()
