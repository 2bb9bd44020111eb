"""Self-supervised embeddings of gearbox vibration: two views of a window are whitened and pulled together."""
import argparse

import torch
import yaml

from gearbox.callbacks import Checkpoint, CsvLogger, Printer, Warmup
from gearbox.data import loaders, prepare
from gearbox.model import Encoder
from gearbox.trainer import Trainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/base.yaml")
    parser.add_argument("--resume", default=None)
    args = parser.parse_args()
    with open(args.config) as f:
        cfg = yaml.safe_load(f)
    torch.set_num_threads(1)
    torch.manual_seed(cfg["seed"])
    prepare(cfg["data"])
    train, valid = loaders(cfg["data"], cfg["seed"])
    model = Encoder(**cfg["model"])
    callbacks = [Warmup(**cfg["warmup"]), CsvLogger(cfg["out"]), Printer(cfg["print_every"]), Checkpoint(cfg["out"])]
    trainer = Trainer(model, cfg["optim"], callbacks)
    if args.resume:
        trainer.load(args.resume)
    trainer.fit(train, valid, cfg["epochs"])


if __name__ == "__main__":
    main()
