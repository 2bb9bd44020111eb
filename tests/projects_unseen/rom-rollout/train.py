"""Learns a quadratic reduced-order model of a chaotic flow by unrolling it further and further."""
import argparse
import json
from pathlib import Path

import torch

from rom.curriculum import stages
from rom.flow import load_or_simulate
from rom.model import Emulator
from rom.stepping import make_step
from rom.tracking import Tracker

BASE = Path(__file__).resolve().parent
DEFAULTS = {"seed": 1, "lr": 0.1, "batch": 64, "horizons": [2, 4, 8, 96], "steps_per_stage": 12,
            "gap": 0.1, "dt": 0.1, "clip": 10.0, "tolerate": 4}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    ap.add_argument("--workdir", default=str(BASE / "work"))
    args = ap.parse_args()
    cfg = dict(DEFAULTS)
    for item in args.set:
        key, value = item.split("=", 1)
        cfg[key] = json.loads(value)

    work = Path(args.workdir)
    work.mkdir(parents=True, exist_ok=True)
    (work / "config.json").write_text(json.dumps(cfg, indent=1))
    torch.manual_seed(cfg["seed"])
    flow = load_or_simulate(work / "trajectory.npz", gap=cfg["gap"])

    model = Emulator(flow.shape[1], cfg["dt"])
    opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    decay = torch.optim.lr_scheduler.ExponentialLR(opt, 0.98)
    tracker = Tracker(work)
    step = make_step(model, opt, clip=cfg["clip"], tolerate=cfg["tolerate"])

    n = 0
    for stage in stages(flow, cfg):
        for start, future in stage.batches():
            loss = step(start, future)
            tracker.scalar("loss", loss, n, horizon=stage.horizon)
            n += 1
        decay.step()
        tracker.save(f"horizon{stage.horizon:03d}", model=model.state_dict(), opt=opt.state_dict(), n=n)
        print(f"horizon {stage.horizon} done, one-step error {model.one_step_error(flow):.5f}")


if __name__ == "__main__":
    main()
