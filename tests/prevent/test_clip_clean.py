"""Clean training is not clipped, and what is not clipped is not changed.

The trainings are those of benchmarks/clip.py, which has the figures of the other modes.
"""

from __future__ import annotations

import pytest
import torch
from clean_trainings import OPTIMIZERS, training
from torch import nn

from stayfinite.prevent.clipping import AdaptiveClipper

STEPS = {"mlp": 400, "cnn": 30, "gpt": 80}


def raw(model: nn.Module) -> list[bytes]:
    tensors = [*model.parameters(), *model.buffers()]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("task", STEPS)
def test_clean_training_is_hardly_ever_clipped(task: str, optimizer: str) -> None:
    run = training(task, optimizer)
    clipper, results = AdaptiveClipper(run.model), []
    losses = [run.step(lambda: results.append(clipper.clip())) for _ in range(STEPS[task])]
    tenth = len(losses) // 10
    assert sum(losses[-tenth:]) < 0.9 * sum(losses[:tenth])
    assert len(results) == STEPS[task]
    assert sum(result.was_clipped for result in results) <= 0.005 * STEPS[task]


@pytest.mark.parametrize("task", STEPS)
def test_training_that_is_not_clipped_keeps_its_bytes(task: str) -> None:
    plain, clipped = training(task, "adamw"), training(task, "adamw")
    clipper, results = AdaptiveClipper(clipped.model), []
    for run, clip in ((plain, None), (clipped, lambda: results.append(clipper.clip()))):
        torch.manual_seed(1)
        for _ in range(10):
            run.step(clip)
    assert not any(result.was_clipped for result in results)
    assert raw(plain.model) == raw(clipped.model)
