import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from reef.curriculum import Curriculum
from reef.dynamics import Interaction
from reef.learn import learn
from reef.survey import SPECIES, Segments, simulate


@dataclass
class Config:
    steps: int = 70
    lr: float = 0.02
    dt: float = 0.5
    batch: int = 32
    surveys: int = 60
    length: int = 120
    save_every: int = 20
    seed: int = 9
    out: str = "reef_out"


def main():
    ap = argparse.ArgumentParser()
    for name, value in vars(Config()).items():
        ap.add_argument(f"--{name}", type=type(value), default=value)
    cfg = Config(**vars(ap.parse_args()))
    Path(cfg.out).mkdir(exist_ok=True)
    torch.manual_seed(cfg.seed)
    segments = Segments(simulate(cfg.surveys, cfg.length, cfg.dt, cfg.seed), cfg.batch, cfg.seed)
    learn(Interaction(len(SPECIES)), segments, Curriculum([(0, 3, 1), (25, 6, 2), (50, 14, 8)]), cfg)


if __name__ == "__main__":
    main()
