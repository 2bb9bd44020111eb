"""The pictures show what was recorded: nothing is lost, whatever the numbers are."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stayfinite.records import Hop, Incident, NaNReport, NaNType, Origin, TensorSummary
from stayfinite.report.html.charts import (
    Window,
    around,
    axis_of,
    decades,
    doublings_left,
    heat_map,
    histogram,
    lineage,
    round_numbers,
    short,
    timeline,
)
from stayfinite.report.store.reading import Sample, Series
from stayfinite.report.store.writer import COLUMNS

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def tensor(**fields: object) -> TensorSummary:
    return TensorSummary(
        **{"name": "x", "shape": (9,), "dtype": "float32", "device": "cpu", "numel": 9, **fields}
    )


def steps_of(losses: list[float], **columns: list[float]) -> Series:
    """A series with these losses, one a step."""
    found = {name: [None] * len(losses) for name in COLUMNS}
    found |= {"step": list(range(len(losses))), "skipped": [0] * len(losses), "loss": losses}
    series = Series()
    series.columns.update({**found, **columns})
    return series


def sampled(rows: list[list[float | None]], layers: list[str]) -> Series:
    series = Series(layers=layers)
    for at, norms in enumerate(rows):
        room = [1.0] * len(layers)
        series.samples.append(Sample(step=16 * at, layers=layers, norms=norms, headroom=room))
    return series


@given(st.lists(FINITE, min_size=1, max_size=20))
def test_every_value_has_its_place_on_the_axis(values: list[float]) -> None:
    axis = axis_of(values)
    places = [axis.at(value) for value in sorted(values)]
    assert all(0 <= place <= 1 for place in places)
    assert places == sorted(places)
    assert len(axis.ticks) <= 6
    assert all(math.isfinite(tick) for tick in axis.ticks)


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [(0, 60, [0, 20, 40, 60]), (0.1, 0.9, [0.2, 0.4, 0.6, 0.8]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round(low: float, high: float, numbers: list[float]) -> None:
    assert round_numbers(low, high) == pytest.approx(numbers)


def test_ticks_of_a_wide_range_are_powers_of_ten() -> None:
    assert decades(0.5e-6, 20) == pytest.approx([1e-6, 1e-4, 1e-2, 1])


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0"), (65536.0, "65,536"), (1e-8, "1e-8"), (1.5e12, "1.5e12"), (math.nan, "NaN")],
)
def test_numbers_are_short(value: float, said: str) -> None:
    assert short(value) == said


def test_histogram_has_a_bar_for_every_count() -> None:
    found = histogram(
        tensor(histogram=((-0.5, 3), (0.0, 2), (0.25, 1), (4.0, 5)), nan_count=1, neg_inf_count=7)
    )
    assert found is not None
    titles = re.findall("<title>(.*?)</title>", found.picture)
    assert titles == [
        "-1 to -0.5: 3 values",
        "zero: 2 values",
        "0.125 to 0.25: 1 value",
        "2 to 4: 5 values",
        "-Inf: 7 values",
        "NaN: 1 value",
    ]
    assert [label.text for label in found.across] == ["-4", "0", "-Inf", "NaN"]


@given(
    st.dictionaries(
        st.sampled_from([sign * 2.0**power for sign in (-1, 1) for power in range(-140, 128)]),
        st.integers(1, 10**9),
        max_size=60,
    ),
    st.integers(0, 3),
)
def test_no_count_of_a_histogram_is_lost(bins: dict[float, int], bad: int) -> None:
    found = histogram(tensor(histogram=tuple(sorted(bins.items())), nan_count=bad))
    if found is None:
        assert not bins
        assert not bad
        return
    counts = [int(each) for each in re.findall(r": (\d+) values?</title>", found.picture)]
    assert sum(counts) == sum(bins.values()) + bad
    boxes = re.findall(r'<rect class="[\w-]+" x="(.*?)" width="(.*?)"', found.picture)
    places = [(float(x), float(width)) for x, width in boxes]
    assert len(places) == len(counts)
    assert all(x >= 0 and w > 0 and x + w <= 1001 for x, w in places)


def test_histogram_of_nothing_is_none() -> None:
    assert histogram(tensor(numel=0)) is None


@pytest.mark.parametrize(
    ("dtype", "largest", "left"),
    [("float16", 32752.0, "1.0"), ("torch.float32", -1.0, "128.0"), ("int64", 5.0, "-")],
)
def test_doublings_left_are_counted_to_the_end_of_the_dtype(
    dtype: str, largest: float, left: str
) -> None:
    ends = {"min": min(largest, 0.0), "max": max(largest, 0.0)}
    assert doublings_left(tensor(dtype=dtype, **ends)) == left


def test_timeline_marks_what_is_bad_skipped_and_an_incident() -> None:
    series = steps_of([1.0, math.nan, 0.5, math.inf], skipped=[0, 1, 0, 0])
    (loss,) = timeline(
        series, Window(first=0, last=3), incidents=[Incident(step=1), Incident(step=99)]
    )
    assert loss.picture.count("sf-bad") == 2
    assert loss.picture.count("sf-skip") == 1
    assert loss.picture.count("sf-mark") == 1
    assert loss.note == "loss, steps 0 to 3: 1 to 0.5, 2 values not finite"


def test_bad_loss_of_an_incident_is_shown_whatever_the_step_says() -> None:
    incidents = [replace(born([]), step=2), replace(born([]), step=4)]
    series = steps_of([1.0, 0.9, 0.9, 0.8])
    (loss,) = timeline(series, Window(first=0, last=4), incidents=incidents)
    assert loss.picture.count("sf-bad") == 2


def test_timeline_shows_only_columns_that_say_something() -> None:
    series = steps_of([1.0, 2.0], lr=[0.1, 0.1], scale=[8.0, 8.0], norm=[3.0, 4.0])
    plots = timeline(series, Window(first=0, last=1), incidents=[])
    assert [plot.name for plot in plots] == ["loss", "gradient norm", "loss scale"]


def test_long_timeline_is_thinned_and_keeps_its_peak() -> None:
    losses = [1.0] * 50_000
    losses[31_234] = 9.0
    (loss,) = timeline(steps_of(losses), Window(first=0, last=49_999), incidents=[])
    (line,) = re.findall(r'class="sf-line" d="(.*?)"', loss.picture)
    heights = [float(each) for each in re.findall(r"[ML][\d.]+ ([\d.]+)", line)]
    assert len(heights) < 1000
    assert min(heights) < 15 < 85 < max(heights)


@pytest.mark.parametrize(
    ("step", "steps", "ends"),
    [
        (34, 60, (0, 59)),
        (500, 1000, (460, 520)),
        (999, 1000, (939, 999)),
        (1000, 1000, (940, 1000)),
    ],
)
def test_window_has_the_incident_and_what_surrounds_it(
    step: int, steps: int, ends: tuple[int, int]
) -> None:
    window = around(step, steps=steps)
    assert (window.first, window.last) == ends


@pytest.mark.parametrize(("first", "last"), [(999_929, 999_999), (0, 999_999), (99_990, 100_050)])
def test_steps_of_a_long_run_have_labels_that_differ(first: int, last: int) -> None:
    steps = list(range(first, last + 1, max(1, (last - first) // 100)))
    series = steps_of([1.0] * len(steps), step=steps)
    (plot,) = timeline(series, Window(first=first, last=last), incidents=[])
    labels = [label.text for label in plot.across]
    assert 2 <= len(labels) == len(set(labels)) <= 5
    assert all(first <= int(label.replace(",", "")) <= last for label in labels)


def test_heat_map_has_a_row_for_each_layer_and_shows_what_is_not_finite() -> None:
    found = heat_map(sampled([[1.0, 1e-3], [math.nan, 1e-3], [None, 0.0]], ["a.w", "b.w"]))
    assert found is not None
    assert found.rows == ("a.w", "b.w")
    assert found.has_bad
    assert (found.low, found.high) == ("0.001", "1")
    assert found.picture.count("sf-hbad") == 1
    assert found.note == "2 layers; 3 sampled steps"


def test_many_layers_are_shown_by_what_they_belong_to() -> None:
    layers = [f"blocks.{at}.{part}" for at in range(30) for part in ("w", "b")]
    found = heat_map(sampled([[float(at + 1) for at in range(60)]], layers))
    assert found is not None
    assert found.rows == tuple(f"blocks.{at}" for at in range(30))
    assert "blocks.29: 60 to 60" in found.picture


def test_thousands_of_layers_without_structure_fit() -> None:
    layers = [f"p{at}" for at in range(2000)]
    found = heat_map(sampled([[1.0] * 2000] * 400, layers))
    assert found is not None
    assert len(found.rows) <= 40
    assert len(found.picture) < 100_000


def test_no_samples_no_heat_map() -> None:
    assert heat_map(Series()) is None


def hop(kind: str, op: str, phase: str = "forward") -> Hop:
    return Hop(kind=kind, op=f"aten.{op}.default", phase=phase)  # type: ignore[arg-type]


def born(hops: list[Hop]) -> Incident:
    seen = NaNReport(has_nan=True, nan_type=NaNType.NAN, location="loss", tensor_shape=())
    return Incident(step=1, reports=(seen,), origin=Origin(phase="forward", lineage=tuple(hops)))


def test_lineage_goes_from_birth_to_what_was_noticed() -> None:
    found = lineage(born([hop("birth", "log"), hop("conversion", "mul"), hop("spread", "sum")]))
    assert found is not None
    said = [station.what for station in found.stations]
    assert said == ["first appeared at log", "became at mul", "still at sum", "noticed in the loss"]


def test_each_pass_has_its_lane() -> None:
    found = lineage(born([hop("birth", "log"), hop("spread", "mm", "backward")]))
    assert found is not None
    assert found.lanes == ("forward", "backward")
    assert [station.lane for station in found.stations] == [0, 1, 1]


def test_long_lineage_is_shortened_and_keeps_every_op_counted() -> None:
    hops = [hop("birth", "log"), *[hop("spread", "add")] * 50, hop("conversion", "mul")]
    found = lineage(born([*hops, *[hop("spread", "add")] * 50]))
    assert found is not None
    assert len(found.stations) < 16
    left = [int(s.what.split()[0]) for s in found.stations if s.kind == "more"]
    shown = sum(station.kind not in ("more", "end") for station in found.stations)
    assert sum(left) + shown == 102
    assert "became at mul" in [station.what for station in found.stations]


def test_without_hops_there_is_no_lineage() -> None:
    assert lineage(born([])) is None
