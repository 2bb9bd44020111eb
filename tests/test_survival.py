"""The survival table: ours comes through, and the others fail where the table says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from hostile import HEALTHY, SEQUENCES, TOO_SMALL, Data, Sequence, new_model
from survival import is_survivor, outcome
from survivors import CONTESTANTS, Contestant, Ours
from torch.nn.functional import mse_loss

# To go on through 200 overflows in a row costs 180 traced incidents: only in the benchmark.
quick = [sequence for sequence in SEQUENCES if not sequence.name.startswith("200")]
by_name = {sequence.name: sequence for sequence in SEQUENCES}


@pytest.mark.parametrize("sequence", quick, ids=lambda sequence: sequence.name)
def test_ours_comes_through(sequence: Sequence) -> None:
    assert is_survivor(outcome(Ours, sequence))


def test_ours_stops_in_time_when_it_goes_on_and_on() -> None:
    row = outcome(Ours, by_name["200 overflows in a row"])
    assert "Training aborted due to NaN" in row["ended"]
    assert row["ends_finite"]


@pytest.mark.parametrize("kind", CONTESTANTS, ids=lambda kind: kind.name)
def test_everyone_learns_when_nothing_goes_wrong(kind: type[Contestant]) -> None:
    assert is_survivor(outcome(kind, HEALTHY))


@pytest.mark.parametrize(
    ("kind", "sequence", "expected"),
    [
        ("GradScaler", "one NaN in a gradient", {"ends_finite": True, "learns": True}),
        ("GradScaler", "NaN between unscale and step", {"ends_finite": False}),
        ("both", "200 overflows in a row", {"ends_finite": False}),
        ("both", "gradients of 1e20 and 1e30", {"ends_finite": True, "learns": False}),
        ("clip norm", "one Inf in a gradient", {"ends_finite": False}),
        ("HF Trainer", "one NaN loss", {"ends_finite": False, "logged_loss": 0.0}),
        ("z-score", "one NaN in a gradient", {"ends_finite": False}),
        ("percentile", "gradients too small for fp16", {"ends_finite": True, "learns": False}),
    ],
)
def test_others_end_as_the_table_says(kind: str, sequence: str, expected: dict[str, Any]) -> None:
    found = next(contestant for contestant in CONTESTANTS if contestant.name == kind)
    row = outcome(found, by_name[sequence])
    assert {key: row[key] for key in expected} == expected


def share_left(loss_times: float, scale: float) -> float:
    """Of the gradients of the first batches in fp16, the share that is not 0."""
    model, data = new_model(), Data()
    left: list[bool] = []
    for number in range(10):
        model.zero_grad()
        inputs, targets = data.batch(number)
        with torch.autocast("cpu", torch.float16):
            loss = mse_loss(model(inputs).float(), targets) * loss_times
        (loss * scale).backward()
        left += [bool(x) for p in model.parameters() for x in p.grad.flatten() != 0]
    return sum(left) / len(left)


def test_gradients_that_are_said_to_be_too_small_for_fp16_are() -> None:
    assert share_left(TOO_SMALL, 1.0) == 0.0
    assert share_left(TOO_SMALL * 4, 1.0) > 0.0
    assert share_left(TOO_SMALL, 2.0**16) > 0.9
