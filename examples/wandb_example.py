"""An incident in Weights & Biases: nothing to configure, the active run is found.

    python examples/wandb_example.py

It is offline here; leave `mode` out to see the alert.
"""

from __future__ import annotations

import wandb
from training import train


def main() -> None:
    with wandb.init(project="stayfinite-example", mode="offline") as run:
        train()
        print(f"{run.summary['stayfinite/incidents']} incident in {run.dir}")
        print(run.summary["stayfinite/last_incident"])


if __name__ == "__main__":
    main()
