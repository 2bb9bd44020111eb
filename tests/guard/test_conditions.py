"""Parts of batches, whatever they are nested in."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from stayfinite.guard.conditions import Split, in_float64

Pair = namedtuple("Pair", "x y")
X, Y = torch.arange(12.0).view(4, 3), torch.arange(4)


@pytest.mark.parametrize(
    "batch",
    [X, (X, Y), [X, Y], {"x": X, "y": Y}, Pair(X, Y), (X, {"deep": [Y, None]}), (X, X.numpy())],
)
def test_rows_are_taken_from_everything_in_the_batch(batch: Any) -> None:
    split = Split(batch)
    assert (split.rows, split.why_not) == (4, None)
    part = Split(split.only([2, 0, 2]))
    assert part.rows == 3
    assert type(split.only([1])) is type(batch)
    assert Split(batch).rows == 4


def test_the_order_and_the_values_are_those_asked_for() -> None:
    x, y = Split((X, Y)).only([2, 0])
    assert torch.equal(x, X[[2, 0]])
    assert torch.equal(y, Y[[2, 0]])


def test_captions_go_with_their_images() -> None:
    part = Split({"x": X, "captions": ["a", "b", "c", "d"]}).only([3, 1])
    assert part["captions"] == ["d", "b"]


def test_lists_of_samples_are_split_as_detectors_take_them() -> None:
    images = [torch.zeros(3, size, size) for size in (4, 5, 6)]
    targets = [{"boxes": torch.zeros(count, 4)} for count in (1, 0, 2)]
    split = Split((images, targets))
    part = split.only([2, 0])
    assert split.rows == 3
    assert [len(target["boxes"]) for target in part[1]] == [2, 1]


@pytest.mark.parametrize("batch", [(X, torch.zeros(3)), {"edges": torch.zeros(2, 9), "x": X}])
def test_tensors_that_do_not_agree_cannot_be_split(batch: Any) -> None:
    split = Split(batch)
    assert split.rows == 0
    assert split.why_not is not None
    assert "agree" in split.why_not


@pytest.mark.parametrize("batch", [7, None, "text", torch.tensor(1.0), {"n": 3}])
def test_what_has_no_rows_cannot_be_split(batch: Any) -> None:
    assert Split(batch).rows == 0


def test_values_of_a_row_are_replaced_in_a_copy() -> None:
    split = Split({"x": X.clone(), "z": torch.zeros(4, 2), "y": Y})
    part = split.with_values(split.only([1, 0]), 2, 4, 3)
    assert split.values == 5
    assert part["x"][0].tolist() == [3.0, 4.0, 11.0]
    assert part["x"][1].tolist() == [0.0, 1.0, 2.0]
    assert split.only([1])["x"][0].tolist() == [3.0, 4.0, 5.0]


def test_raising_changes_only_floating_point_tensors() -> None:
    x, y, z = in_float64((X, Y, np.zeros(3, dtype=np.float32)))
    assert (x.dtype, y.dtype, z.dtype) == (torch.float64, torch.int64, np.float32)
