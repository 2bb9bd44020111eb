"""What one batch says: each kind of fault is found, with its rows, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stayfinite.errors import InputError
from stayfinite.prevent.data.check import batch_risks


def rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, 10, generator=generator), torch.randint(5, (64,), generator=generator)


def said(batch: Any, **options: Any) -> list[tuple[str, str, str]]:
    return [(risk.level, risk.where, risk.cause) for risk in batch_risks(batch, **options)]


def test_a_healthy_batch_has_no_risks() -> None:
    assert batch_risks(rows(), classes=5) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_input_is_high_and_a_bad_target_medium(bad: float) -> None:
    x, _ = rows()
    y = x.mean(1)
    x[3, 4], y[7] = bad, bad
    assert said((x, y)) == [
        ("high", "batch.0", "bad_input_data"),
        ("medium", "batch.1", "bad_label"),
    ]


def test_counts_and_rows_of_what_is_not_finite_are_told() -> None:
    x, y = rows()
    x[3, 4] = x[3, 5] = float("nan")
    x[9, 0] = float("inf")
    (risk,) = batch_risks((x, y))
    assert risk.evidence == {"nan": 2, "inf": 1, "rows": 2}
    assert "2 NaN and 1 Inf of 640 values, in 2 of 64 rows" in risk.what


@pytest.mark.parametrize(("wrong", "told"), [(5, "are 5;"), (-1, "are -1;"), (255, "are 255;")])
def test_labels_out_of_range_are_told(wrong: int, told: str) -> None:
    x, y = rows()
    y[[2, 40]] = wrong
    (risk,) = batch_risks((x, y), classes=5)
    assert risk.level == "high"
    assert "2 labels, in 2 of 64 rows" in risk.what
    assert told in risk.what


def test_ignored_labels_are_in_range() -> None:
    x, y = rows()
    y[2] = -100
    assert batch_risks((x, y), classes=5) == []
    y[2] = 255
    assert batch_risks((x, y), classes=5, ignore_index=255) == []


def test_a_batch_without_labels_that_count_is_high() -> None:
    x, y = rows()
    assert said((x, torch.full_like(y, -100)), classes=5) == [("high", "batch.1", "bad_label")]


def test_an_outlier_is_told_with_its_column() -> None:
    x, y = rows()
    x[3, 2] = 1e4
    (risk,) = batch_risks((x, y))
    assert (risk.level, risk.cause) == ("high", "unnormalized_input")
    assert "1 row out of scale in column 2: up to 1e+04" in risk.what


def test_pixels_as_floats_are_told_and_as_bytes_are_not() -> None:
    images = torch.randint(256, (32, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    assert said((images.float(), torch.arange(32))) == [("medium", "batch.0", "unnormalized_input")]
    assert said((images.to(torch.uint8), torch.arange(32))) == []
    assert said((images / 255, torch.arange(32))) == []


def test_a_column_that_does_not_vary_is_low() -> None:
    x, y = rows()
    x[:, 4] = 1
    assert said((x, y)) == [("low", "batch.0", "division_by_zero")]


def test_a_mask_that_hides_a_whole_row_is_told() -> None:
    ids = torch.randint(1, 100, (16, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[3:, 8:] = 0
    assert said({"input_ids": ids, "attention_mask": mask}) == []
    mask[5] = 0
    found = said({"input_ids": ids, "attention_mask": mask})
    assert found == [("high", "batch.attention_mask", "softmax_all_masked")]


def test_sequences_of_no_length_are_told() -> None:
    x, lengths = torch.rand(4, 6, 3), torch.tensor([6, 3, 0, 1])
    assert said({"x": x, "lengths": lengths}) == [("high", "batch.lengths", "empty_reduction")]
    assert said([torch.zeros(4, 0, 3)]) == [("high", "batch.0", "empty_reduction")]


def test_a_batch_of_one_is_low() -> None:
    assert said(torch.rand(1, 8)) == [("low", "batch", "batchnorm_degenerate")]


def test_what_is_picked_is_what_is_judged() -> None:
    x, y = rows()
    batch = {"a": x, "b": y + 10}
    assert said(batch, classes=5) == []
    assert said(batch, classes=5, targets="b") == [("high", "batch.b", "bad_label")]


def test_a_path_that_is_not_there_is_refused_with_those_that_are() -> None:
    x, y = rows()
    with pytest.raises(InputError, match=r"no tensor at 'label'; it has x, y\."):
        batch_risks({"x": x, "y": y}, targets="label")


def test_a_mask_with_a_class_for_each_pixel_is_a_label() -> None:
    masks = torch.randint(4, (8, 6, 6), generator=torch.Generator().manual_seed(0))
    batch = {"image": torch.rand(8, 3, 6, 6), "mask": masks}
    assert said(batch, classes=4) == []
    masks[3, 0, 0] = 200
    assert said(batch, classes=4) == [("high", "batch.mask", "bad_label")]


def test_tensors_of_any_state_can_be_looked_at() -> None:
    x, y = rows()
    wanted = x.clone().requires_grad_()
    assert batch_risks((wanted * 2, y), classes=5) == []
    with torch.inference_mode():
        assert batch_risks((x * 2, y), classes=5) == []
    assert batch_risks((x.as_strided((64, 5), (10, 2)), y), classes=5) == []
    assert batch_risks((x.t().contiguous().t(), y), classes=5) == []
