"""The promise: what dies in fp16 with plain torch trains through, as well as in fp32.

The runs are those of examples/amp_vs_plain.py.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "amp_vs_plain.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("amp_vs_plain", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ours(example: Any) -> list[tuple[float, str]]:
    """The error of each seed, and what was said."""
    return [example.our_run(seed) for seed in example.SEEDS]


@pytest.fixture(scope="module")
def errors(example: Any, ours: list[tuple[float, str]]) -> dict[str, list[float]]:
    """The error of each seed, by who trained."""
    kinds = ("fp32", "fp16", "fp16 and GradScaler")
    found = {kind: [example.plain_run(seed, kind)[0] for seed in example.SEEDS] for kind in kinds}
    return {**found, "ours": [error for error, _ in ours]}


@pytest.mark.parametrize("kind", ["fp16", "fp16 and GradScaler"])
def test_plain_torch_dies_in_fp16_with_every_seed(
    errors: dict[str, list[float]], kind: str
) -> None:
    worst = max(errors["fp32"])
    assert all(math.isnan(error) or error > 4 * worst for error in errors[kind])


def test_trainer_in_fp16_ends_within_the_noise_of_fp32(errors: dict[str, list[float]]) -> None:
    noise = statistics.stdev(errors["fp32"])
    apart = statistics.mean(errors["ours"]) - statistics.mean(errors["fp32"])
    assert abs(apart) < noise
    assert noise < 0.1 * statistics.mean(errors["fp32"])  # else it would say nothing


def test_only_the_layer_that_overflows_leaves_half_precision(
    ours: list[tuple[float, str]],
) -> None:
    _, said = ours[0]
    assert said.endswith("module '4' runs in float32 from now on")
    assert said.count("step ") == 1
