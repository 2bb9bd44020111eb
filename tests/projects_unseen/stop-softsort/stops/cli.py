import argparse
from functools import partial

import torch

from .annealing import SCHEDULES
from .model import Ranker
from .tours import make_tours
from .training import Experiment


def build_parser():
    p = argparse.ArgumentParser(prog="stops")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--anneal-steps", type=int, default=120)
    p.add_argument("--tau", type=float, default=1.0)
    p.add_argument("--schedule", choices=SCHEDULES, default="linear")
    p.add_argument("--workdir", default="work")
    p.add_argument("--continue", dest="cont", action="store_true")
    return p


def main(argv=None):
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(17)
    schedule = partial(SCHEDULES[args.schedule], start=args.tau, over=args.anneal_steps)
    exp = Experiment(Ranker(), make_tours, schedule, args.workdir)
    if args.cont:
        exp.load()
    exp.train(args.steps)
