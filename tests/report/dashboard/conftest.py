"""One server for the tests that only look; its folder has four runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboards import Dashboard, serving
from payloads import PAYLOADS, vicious_run
from recorded_runs import record

from stayfinite.records import Diagnosis, Forecast, Incident, NaNReport, NaNType


def incident(step: int, **fields: object) -> Incident:
    seen = NaNReport(has_nan=True, nan_type=NaNType.NAN, location="loss", tensor_shape=())
    why = Diagnosis(cause="log_of_zero", why="log(0) is -Inf.", fix="Add an eps.")
    return Incident(**{"step": step, "reports": (seen,), "diagnosis": why, **fields})


@pytest.fixture(scope="session")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """Runs `d-first`, `c-second`, `b-broken` and `a-vicious`, in this order.

    The first has an incident, a forecast and a spike.
    """
    base = tmp_path_factory.mktemp("dashboard")
    runs = base / "runs"
    soon = Forecast(
        step=50,
        signal="activation",
        where="encoder.3.ffn",
        dtype="float16",
        steps_left=18,
        steps_low=12,
        steps_high=30,
    )
    record(
        runs / "d-first",
        steps=90,
        incidents=[incident(70)],
        forecasts=[soon, Forecast(step=60, signal="loss_spike", where="loss", severity="info")],
        scale=1024.0,
        terms=["box"],
    )
    record(runs / "c-second", steps=60, config={"on_nan": "stop"})
    record(runs / "b-broken", steps=20)
    with open(runs / "b-broken" / "rank-0.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind":"steps","step":[20,\n{"kind":"steps"}\n{"kind":"ste')
    vicious_run(runs / "a-vicious", PAYLOADS)
    with serving(runs, base / "state") as dashboard:
        yield dashboard


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"
