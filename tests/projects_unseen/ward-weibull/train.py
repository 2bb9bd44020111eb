import argparse
import json
import logging
from pathlib import Path

import torch

from aft.net import WeibullNet
from aft.registry import Registry, build_registry
from aft.rolling import RollingTrainer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--config", default="config.json")
    args = ap.parse_args()
    cfg = json.loads(Path(args.config).read_text())

    out = Path(cfg["out"])
    out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s",
                        handlers=[logging.StreamHandler(), logging.FileHandler(out / "train.log", mode="w")])
    torch.manual_seed(cfg["seed"])

    path = build_registry(out / "registry.csv", cfg["months"], cfg["patients_per_month"], cfg["seed"])
    registry = Registry(path)
    model = WeibullNet(registry.x.shape[1], cfg["hidden"], cfg["dropout"])
    RollingTrainer(model, registry, cfg).run()
    torch.save(model.state_dict(), out / "final.pt")


if __name__ == "__main__":
    main()
