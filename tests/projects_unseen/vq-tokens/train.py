"""Discrete tokens for audio frames: an autoencoder is warmed up, then quantised.

    python train.py            both stages
    python train.py --stage 2  continue from runs/stage1.pt
"""
import argparse
from pathlib import Path

import torch

from vq.audio import FrameStore, synthesise
from vq.autoencoder import AutoEncoder
from vq.fitting import Recorder, fit

HERE = Path(__file__).resolve().parent


def stage_one(store, runs, recorder, args):
    model = AutoEncoder(quantise=False)
    for step, loss in fit(model, store, steps=args.warm_steps, lr=args.lr, recorder=recorder):
        print(f"step {step} loss {loss:.4f}")
    torch.save({"model": model.state_dict(), "step": recorder.step}, runs / "stage1.pt")


def stage_two(store, runs, recorder, args):
    state = torch.load(runs / "stage1.pt", weights_only=True)
    model = AutoEncoder(quantise=True, codes=args.codes)
    missing, unexpected = model.load_state_dict(state["model"], strict=False)
    assert not unexpected and all(k.startswith("quantizer.") for k in missing), (missing, unexpected)
    recorder.step = state["step"]
    for step, loss in fit(model, store, steps=args.vq_steps, lr=args.lr, recorder=recorder, collect=4):
        print(f"step {step} loss {loss:.4f} perplexity {model.quantizer.last_perplexity:.2f}")
        if step % 10 == 9:
            torch.save({"model": model.state_dict(), "step": step + 1}, runs / "stage2.pt")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--stage", type=int, choices=[0, 1, 2], default=0, help="0: both")
    ap.add_argument("--codes", type=int, default=48)
    ap.add_argument("--warm-steps", type=int, default=25)
    ap.add_argument("--vq-steps", type=int, default=30)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=4)
    args = ap.parse_args()

    torch.manual_seed(args.seed)
    runs = HERE / "runs"
    runs.mkdir(exist_ok=True)
    store = FrameStore(synthesise(HERE / "audio", seed=args.seed), batch=24)
    with Recorder(runs / "curve.csv") as recorder:
        if args.stage in (0, 1):
            stage_one(store, runs, recorder, args)
        if args.stage in (0, 2):
            stage_two(store, runs, recorder, args)


if __name__ == "__main__":
    main()
