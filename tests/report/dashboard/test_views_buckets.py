"""Curves with few points tell the truth about many steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from stayfinite.report.dashboard.live_runs import MOST, UNKNOWN, Columns, Heat
from stayfinite.report.dashboard.views import buckets_of, grid_over, totals
from stayfinite.report.store.writer import COLUMNS

NAN, INF = math.nan, math.inf


def columns_of(losses: list[float | None], **more: list[Any]) -> Columns:
    steps = list(range(len(losses)))
    given: dict[str, list[Any]] = {"step": steps, "loss": losses, **more}
    columns = Columns()
    columns.add_steps({name: given.get(name, [None] * len(losses)) for name in COLUMNS}, {})
    return columns


@pytest.mark.parametrize(
    ("last", "most"), [(0, 800), (799, 800), (10**6 - 1, 800), (10**9, 10), (7, 2)]
)
def test_grid_covers_all_steps_with_few_buckets(last: int, most: int) -> None:
    grid = grid_over(0, last, most=most)
    assert grid.count <= most
    assert grid.first <= 0
    assert grid.first + grid.width * grid.count > last


def test_grid_of_a_growing_run_keeps_its_edges() -> None:
    small, large = grid_over(0, 4_100, most=400), grid_over(0, 7_900, most=400)
    assert small.width == large.width
    assert set(small.edges) <= set(large.edges)


def test_single_steps_are_shown_as_they_are() -> None:
    found = buckets_of(columns_of([3.0, None, NAN, 1.0]), ["loss"], grid_over(0, 3, most=10))
    assert found["loss"] == {"mid": [3.0, None, None, 1.0], "bad": [0, 0, 1, 0]}


def test_buckets_match_a_plain_count() -> None:
    make = np.random.default_rng(0)
    values: list[float | None] = make.normal(size=5_000).tolist()
    for at in make.integers(0, 5_000, 400):
        values[at] = [None, NAN, INF, -INF][int(at) % 4]
    grid = grid_over(0, 4_999, most=60)
    found = buckets_of(columns_of(values), ["loss"], grid)["loss"]
    for at, start in enumerate(grid.edges[:-1]):
        inside = [v for v in values[start : start + grid.width] if v is not None]
        finite = np.array([v for v in inside if math.isfinite(v)], np.float32)
        assert found["low"][at] == pytest.approx(finite.min(), rel=1e-5)
        assert found["high"][at] == pytest.approx(finite.max(), rel=1e-5)
        assert found["mid"][at] == pytest.approx(finite.mean(dtype=np.float64), rel=1e-4, abs=1e-6)
        assert found["bad"][at] == len(inside) - len(finite)


def test_one_spike_in_a_million_is_seen() -> None:
    losses = [1.0] * 1_000_000
    losses[654_321] = 50.0
    found = buckets_of(columns_of(losses), ["loss"], grid_over(0, 999_999, most=800))["loss"]
    assert max(found["high"]) == 50.0


def test_skipped_steps_are_counted() -> None:
    columns = columns_of([1.0] * 100, skipped=[1 if at % 10 == 0 else 0 for at in range(100)])
    grid = grid_over(0, 99, most=11)
    assert totals(columns, "skipped", grid) == [1] * 10


def test_a_million_steps_take_less_than_30_mb() -> None:
    columns = columns_of([1.0] * 100_000)
    kept = sum(len(columns[name]) * columns[name].itemsize for name in COLUMNS if name != "time")
    assert kept * 10 < 30e6


def test_term_that_comes_late_stands_at_its_steps() -> None:
    columns = columns_of([1.0, 2.0])
    line = {name: [2, 3] if name == "step" else [None, None] for name in COLUMNS}
    columns.add_steps(line, {"box": [5.0, 6.0]})
    found = buckets_of(columns, ["term:box"], grid_over(0, 3, most=10))
    assert found["term:box"]["mid"] == [None, None, 5.0, 6.0]


def row(*values: float) -> Any:
    return np.array(values, np.float32)


def test_heat_keeps_the_worst_of_samples_that_share_a_column() -> None:
    heat = Heat()
    for step in range(5 * MOST):
        norm = NAN if step == 700 else 9.0 if step == 1_500 else 1.0
        heat.add(step, ["a", "b"], row(norm, 2.0), row(3.0 if step == 42 else 8.0, 8.0))
    steps, norms = heat.table("norm", most=10**6)
    assert len(steps) <= MOST
    assert steps == sorted(set(steps))
    assert np.isnan(norms[0]).sum() == 1
    assert np.nanmax(norms[0]) == 9.0
    assert set(norms[1]) == {2.0}
    assert heat.table("headroom", most=3)[1][0].min() == 3.0


def test_layers_that_come_later_are_unknown_before() -> None:
    heat = Heat()
    heat.add(0, ["a"], row(1.0), row(1.0))
    heat.add(16, ["b", "a"], row(5.0, 2.0), row(1.0, 1.0))
    _, norms = heat.table("norm", most=10)
    assert norms.tolist() == [[1.0, 2.0], [UNKNOWN, 5.0]]
    assert heat.history("b") == {
        "steps": [0, 16],
        "norms": [UNKNOWN, 5.0],
        "headroom": [UNKNOWN, 1.0],
    }
    assert heat.history("c") is None
