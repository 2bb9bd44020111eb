"""Federated Weibull survival model: every round a few clinics fit locally with L-BFGS, the server averages."""
import argparse
import logging
import sys
from pathlib import Path

import torch

from fedclinic.cohort import load_sites, prepare
from fedclinic.server import Server

log = logging.getLogger("fedclinic")


def setup_logging(out):
    out.mkdir(parents=True, exist_ok=True)
    fmt = logging.Formatter("%(levelname).1s %(name)s: %(message)s")
    for handler in (logging.StreamHandler(sys.stdout), logging.FileHandler(out / "server.log", mode="w")):
        handler.setFormatter(fmt)
        logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)


def main(argv=None):
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", type=Path, default=Path("cohort"))
    ap.add_argument("--out", type=Path, default=Path("runs/fed"))
    ap.add_argument("--rounds", type=int, default=14)
    ap.add_argument("--clients", type=int, default=3)
    ap.add_argument("--seed", type=int, default=20)
    args = ap.parse_args(argv)
    setup_logging(args.out)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    prepare(args.data)
    server = Server(load_sites(args.data), args.out, args.clients, args.seed)
    for number in range(args.rounds):
        if not server.round(number):
            log.error("round %d gave a non-finite model, giving up", number)
            sys.exit(3)
    log.info("done, c-index proxy %.3f", server.score())


if __name__ == "__main__":
    main()
