"""An incident in TensorBoard: nothing to configure, the open writer is found.

python examples/tensorboard_example.py
tensorboard --logdir runs
"""

from __future__ import annotations

from torch.utils.tensorboard import SummaryWriter
from training import train


def main() -> None:
    with SummaryWriter() as writer:
        count = train()
    print(f"{count} incident in {writer.get_logdir()}: under Scalars, Text and Histograms.")


if __name__ == "__main__":
    main()
