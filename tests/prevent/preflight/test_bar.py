"""Real bugs are flagged on their line before the first bad step; healthy scripts are left be."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from case_runs import CASES, ROOT, SOURCE, Case, Finished, accepted, cases_in, run_python
from preflight import is_scored

pytestmark = pytest.mark.xdist_group("preflight")
SCORED = [case for case in cases_in([CASES]) if is_scored(case)]
HEALTHY = sorted((ROOT / "tests" / "healthy").glob("*.py"))


@functools.cache
def flight(script: Path) -> Finished:
    """One preflight of the script."""
    words = ("-m", "stayfinite", "preflight", "--json")
    finished = run_python(words, script, env={"PYTHONPATH": SOURCE}, timeout=120)
    assert finished.code in (0, 1), finished.err
    return finished


def warnings(script: Path) -> list[dict[str, Any]]:
    return [risk for risk in flight(script).result["risks"] if risk["level"] != "low"]


def is_flagged(case: Case) -> bool:
    lines = {f"train.py:{line}" for line in accepted(case.truth, "line")}
    return any(risk["where"] in lines for risk in warnings(case.folder / "train.py"))


@pytest.mark.parametrize("case", SCORED, ids=lambda case: case.name)
def test_a_preflight_ends_well_and_changes_no_file(case: Case) -> None:
    assert flight(case.folder / "train.py").changed == ()


def test_the_guilty_line_is_flagged_in_most_cases() -> None:
    hits = [is_flagged(case) for case in SCORED]
    assert len(hits) >= 17
    assert sum(hits) >= 0.75 * len(hits)


@pytest.mark.parametrize("script", HEALTHY, ids=lambda script: script.stem)
def test_a_healthy_script_has_at_most_one_warning(script: Path) -> None:
    assert len(warnings(script)) <= 1
