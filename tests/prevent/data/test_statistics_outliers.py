"""Which values are called outliers, and which are only large."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stayfinite.prevent.data.statistics import FEWEST_ROWS, OutlierLimits, limits_of, usual_size


def limits(column: Tensor, scale: float = 1.0) -> OutlierLimits:
    """With the whole column as the sample and its ends as extremes."""
    rows = column.double().unsqueeze(1)
    ordered = rows.sort(0).values
    found = limits_of(rows, torch.cat([ordered[:16], ordered[-16:]]), scale)
    assert found is not None
    return found


def outliers(column: Tensor, scale: float = 1.0) -> list[float]:
    block = column.double().unsqueeze(1)
    return block[limits(column, scale).beyond(block)].tolist()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 1.5])
def test_long_tails_have_no_outliers(generator: torch.Generator, sigma: float) -> None:
    assert outliers((sigma * torch.randn(2000, generator=generator)).exp()) == []


def test_a_glitch_is_an_outlier(generator: torch.Generator) -> None:
    column = torch.randn(500, generator=generator)
    column[17] = -1e4
    assert outliers(column) == [-1e4]


@pytest.mark.parametrize("part", [0.002, 0.01, 0.05, 0.2])
def test_marks_for_missing_values_do_not_hide_one_another(
    generator: torch.Generator, part: float
) -> None:
    column = 40 + 15 * torch.randn(1000, generator=generator)
    is_missing = torch.rand(1000, generator=generator) < part
    column[is_missing] = -9999
    assert outliers(column) == [-9999.0] * int(is_missing.sum())


def test_one_hot_columns_have_no_outliers() -> None:
    column = torch.zeros(1000)
    column[3] = 1
    assert outliers(column) == []
    column[::40] = 1
    assert outliers(column) == []


def test_a_standardised_column_of_mostly_zeros_has_none(generator: torch.Generator) -> None:
    amounts = (8 + torch.randn(1000, generator=generator)).exp()
    column = torch.where(torch.rand(1000, generator=generator) < 0.08, amounts, torch.zeros(()))
    column[5] = 99_999
    assert outliers((column - column.mean()) / column.std()) == []


def test_where_nearly_all_are_the_same_the_scale_of_the_tensor_counts() -> None:
    column = torch.zeros(1000)
    column[3] = 50
    assert outliers(column, scale=1.0) == [50]
    assert outliers(column, scale=10.0) == []


def test_missing_values_are_not_counted(generator: torch.Generator) -> None:
    column = torch.randn(500, generator=generator)
    column[:200] = torch.nan
    assert outliers(column) == []
    column[300] = 1e5
    assert outliers(column) == [1e5]


def test_a_column_of_missing_values_has_none() -> None:
    assert outliers(torch.full((100,), torch.nan)) == []


def test_few_rows_say_nothing() -> None:
    rows = torch.zeros(FEWEST_ROWS - 1, 1, dtype=torch.float64)
    assert limits_of(rows, rows, 1.0) is None


def test_how_many_times_farther_is_told() -> None:
    column = torch.cat([torch.linspace(-1, 1, 99), torch.tensor([300.0])])
    found = limits(column)
    times = found.times(torch.tensor([300.0], dtype=torch.float64), torch.tensor([0]))
    assert times.item() == pytest.approx(300 / (3 * 0.75), rel=0.05)


def test_the_usual_size_is_that_of_what_is_not_zero() -> None:
    elements = torch.tensor([[0.0, 3.0, -3.0, 0.0, torch.nan, 0.0]], dtype=torch.float64)
    assert usual_size(elements) == 3
    assert usual_size(torch.zeros(4, 2, dtype=torch.float64)) == 0
