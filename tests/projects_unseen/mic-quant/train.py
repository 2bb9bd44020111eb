"""Keyword spotting on a four-microphone array: float training first, then quantisation-aware fine-tuning to int8."""
import argparse
import logging

import torch

from micq.config import Config
from micq.data import loader, prepare
from micq.model import KeywordNet
from micq.pipeline import Pipeline


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--float-epochs", type=int, default=3)
    ap.add_argument("--qat-epochs", type=int, default=2)
    ap.add_argument("--workers", type=int, default=1)
    ap.add_argument("--out", default="runs/mic")
    ap.add_argument("--resume-float", help="skip the first phase and start from this checkpoint")
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s | %(message)s")
    cfg = Config(float_epochs=args.float_epochs, qat_epochs=args.qat_epochs, workers=args.workers, out=args.out)
    torch.set_num_threads(1)
    torch.manual_seed(cfg.seed)
    prepare(cfg)
    pipe = Pipeline(cfg, KeywordNet(cfg), loader(cfg, "train"), loader(cfg, "test"))
    if args.resume_float:
        pipe.model.load_state_dict(torch.load(args.resume_float))
    else:
        pipe.float_phase()
    pipe.qat_phase()


if __name__ == "__main__":
    main()
