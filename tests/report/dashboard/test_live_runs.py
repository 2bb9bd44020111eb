"""What the dashboard knows of runs whose steps it has not read yet."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import record

from stayfinite.records import Diagnosis, Incident, NaNReport, NaNType
from stayfinite.report.dashboard.live_runs import Columns, GlancedRun, RunIndex, id_of
from stayfinite.report.dashboard.views import (
    buckets_of,
    grid_over,
    incidents_view,
    runs_view,
    totals,
)
from stayfinite.report.store.writer import COLUMNS

SEEN = NaNReport(has_nan=True, nan_type=NaNType.NAN, location="loss", tensor_shape=())
BAD = Incident(step=7, reports=(SEEN,), diagnosis=Diagnosis(cause="log_of_zero", why=".", fix="."))


def test_incidents_are_known_before_the_steps_of_an_opened_run_are_read(tmp_path: Path) -> None:
    path = record(tmp_path / "run", steps=20, incidents=[BAD])
    index = RunIndex([tmp_path])
    index.look()
    run = index.open(id_of(path))
    assert run is not None
    assert run.steps == 0
    shown = incidents_view(index, {"runs": id_of(path)})
    assert [line["step"] for line in shown["incidents"]] == [7]


def test_a_run_is_listed_only_when_it_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        record(tmp_path / name, steps=5)
    index, listed = RunIndex([tmp_path]), []
    read_on = GlancedRun.refresh

    def refresh(run: GlancedRun) -> bool:
        listed.append([each["name"] for each in runs_view(index)["runs"]])
        return read_on(run)

    monkeypatch.setattr(GlancedRun, "refresh", refresh)
    index.look()
    assert listed == [[], ["b"]]
    assert {run["state"] for run in runs_view(index)["runs"]} == {"finite"}


@pytest.mark.parametrize(
    "ask", [lambda c, g: buckets_of(c, ["loss"], g), lambda c, g: totals(c, "skipped", g)]
)
def test_steps_can_be_added_as_soon_as_a_reader_gives_the_lock_back(ask: Any) -> None:
    columns, more = Columns(), {name: [1] for name in COLUMNS}
    columns.add_steps(more, {})

    class Writer:
        """Adds a step in the moment in which the lock is free."""

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            columns.lock = threading.Lock()
            columns.add_steps(more, {})

    columns.lock = Writer()  # type: ignore[assignment]
    ask(columns, grid_over(0, 1, most=10))
    assert len(columns) == 2
