"""Real bugs are flagged on their line before the first bad step; healthy scripts are left be."""

from __future__ import annotations

from pathlib import Path

import pytest
from case_runs import CASES, ROOT, Case, accepted, cases_in
from preflight import is_scored
from preflight_runs import Flight, preflights

pytestmark = pytest.mark.xdist_group("preflight")
SCORED = [case for case in cases_in([CASES]) if is_scored(case)]
HEALTHY = sorted((ROOT / "tests" / "healthy").glob("*.py"))


@pytest.fixture(scope="module")
def flights() -> dict[Path, Flight]:
    """All scripts, each once, from one process."""
    scripts = [*(case.folder / "train.py" for case in SCORED), *HEALTHY]
    return dict(zip(scripts, preflights(scripts), strict=True))


def is_flagged(case: Case, flight: Flight) -> bool:
    lines = {f"train.py:{line}" for line in accepted(case.truth, "line")}
    return any(risk["where"] in lines for risk in flight.warnings)


def test_the_guilty_line_is_flagged_in_most_cases(flights: dict[Path, Flight]) -> None:
    hits = [is_flagged(case, flights[case.folder / "train.py"]) for case in SCORED]
    assert len(hits) >= 17
    assert sum(hits) >= 0.75 * len(hits)


def test_no_preflight_fails(flights: dict[Path, Flight]) -> None:
    failed = {script: flight.err for script, flight in flights.items() if flight.code not in (0, 1)}
    assert failed == {}


@pytest.mark.parametrize("script", HEALTHY, ids=lambda script: script.stem)
def test_a_healthy_script_has_at_most_one_warning(
    script: Path, flights: dict[Path, Flight]
) -> None:
    assert len(flights[script].warnings) <= 1
