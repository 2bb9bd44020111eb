import argparse
from pathlib import Path

import torch
import yaml

from cover.tiles import Tiles
from cover.trainer import Trainer
from cover.unet import UNet


def main():
    ap = argparse.ArgumentParser(description="land-cover segmentation")
    ap.add_argument("--config", default="config.yaml")
    args = ap.parse_args()
    cfg = yaml.safe_load(Path(args.config).read_text())
    Path(cfg["out"]).mkdir(exist_ok=True)
    torch.manual_seed(cfg["seed"])
    d = cfg["data"]
    train_set, val_set = Tiles(d["tiles"], d["size"], cfg["seed"]), Tiles(32, d["size"], cfg["seed"] + 1)
    Trainer(UNet(d["bands"], d["classes"]), train_set, val_set, cfg).run()


if __name__ == "__main__":
    main()
