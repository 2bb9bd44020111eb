import argparse
import json
from pathlib import Path

import torch

from brine.stages import Journal, adapt, pretrain

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--settings", default="settings.json")
    ap.add_argument("--stage", choices=["base", "site", "all"], default="all")
    args = ap.parse_args()
    cfg = json.loads(Path(args.settings).read_text())
    out = Path(cfg["out"])
    out.mkdir(exist_ok=True)
    torch.manual_seed(cfg["seed"])
    journal = Journal(out / "journal.jsonl")
    if args.stage in ("base", "all"):
        pretrain(cfg, out, journal)
    if args.stage in ("site", "all"):
        adapt(cfg, out, journal)
