import argparse
import logging
import sys
from pathlib import Path

import torch

from voice.corpus import WORDS, prepare
from voice.data import make_loader
from voice.features import BANDS
from voice.model import AcousticModel
from voice.trainer import Trainer


def main():
    parser = argparse.ArgumentParser(description="CTC recogniser for push-to-talk clips")
    parser.add_argument("--data", default="data")
    parser.add_argument("--out", default="runs/voice")
    parser.add_argument("--clips", type=int, default=480)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()

    Path(args.out).mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s",
        handlers=[logging.FileHandler(Path(args.out) / "train.log"), logging.StreamHandler(sys.stdout)],
    )
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    manifest = prepare(args.data, args.clips, args.seed)
    train_loader = make_loader(manifest, "train", args.batch_size, args.workers, args.seed)
    dev_loader = make_loader(manifest, "dev", args.batch_size, 0, args.seed)
    model = AcousticModel(BANDS, len(WORDS) + 1)
    Trainer(model, train_loader, dev_loader, args.out).fit(args.epochs)


if __name__ == "__main__":
    main()
