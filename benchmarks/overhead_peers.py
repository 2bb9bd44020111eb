"""Peers that are not always installed; each is imported only where it is measured."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from workloads import Workload


@contextlib.contextmanager
def debug_underflow_overflow(work: Workload) -> Iterator[None]:
    """transformers' forward-hook debugger, attached to the model."""
    from transformers.debug_utils import DebugUnderflowOverflow

    before = {m: set(m._forward_hooks) for m in work.model.modules()}
    with contextlib.redirect_stdout(io.StringIO()):
        DebugUnderflowOverflow(work.model, max_frames_to_save=1)
    try:
        yield
    finally:  # it throws its own handles away
        for module, hooks in before.items():
            for key in set(module._forward_hooks) - hooks:
                del module._forward_hooks[key]


def lightning_anomaly(work: Workload, *, rounds: int, steps: int) -> float:
    """What Trainer(detect_anomaly=True) adds to the steps of the same Trainer without it."""
    ratios = []
    for _ in range(rounds):
        plain = _lightning_seconds(work, steps, detect_anomaly=False)
        ratios.append(_lightning_seconds(work, steps, detect_anomaly=True) / plain)
    return statistics.median(ratios) - 1


def _lightning_seconds(work: Workload, steps: int, *, detect_anomaly: bool) -> float:
    from lightning.pytorch import LightningModule, Trainer

    ends: list[float] = []

    class Step(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return work.loss()

        def configure_optimizers(self) -> Any:
            return work.optimizer

        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.perf_counter())

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            max_steps=steps + 1,
            detect_anomaly=detect_anomaly,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Step(), [0] * (steps + 1))
    return statistics.median(b - a for a, b in itertools.pairwise(ends))
