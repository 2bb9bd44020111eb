"""Activity recognition from sensor recordings with a linear-attention transformer, float16 autocast."""
import argparse
from pathlib import Path

import torch
import yaml

from lin.data import prepare_shards, shard_batches
from lin.engine import Engine
from lin.model import LinearTransformer

HERE = Path(__file__).resolve().parent


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--config", default=str(HERE / "configs" / "base.yaml"))
    ap.add_argument("--no-amp", action="store_true")
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()
    cfg = yaml.safe_load(open(args.config))
    if args.no_amp:
        cfg["train"]["amp"] = None
    torch.manual_seed(cfg["seed"])

    shards = prepare_shards(HERE / cfg["data"]["path"], cfg["data"], cfg["seed"])
    model = LinearTransformer(cfg["data"]["sensors"], **cfg["model"])
    engine = Engine(model, cfg["train"], HERE / cfg["train"]["log_dir"])
    if args.resume:
        engine.load(args.resume)

    for epoch in range(engine.epoch, cfg["train"]["epochs"]):
        for batch in shard_batches(shards, cfg["train"]["batch_size"]):
            stats = engine.step(batch)
            print(f"step {stats['step']} loss {stats['loss']:.4f} acc {stats['acc']:.3f} "
                  f"gnorm {stats['gnorm']:.3f}")
        engine.end_epoch(epoch)


if __name__ == "__main__":
    main()
