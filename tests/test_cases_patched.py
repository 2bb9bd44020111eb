"""Real bugs: the change that is shown for one has been tried, holds, and is the right one."""

from __future__ import annotations

from typing import Any

import pytest
from case_runs import CASES, Case, cases_in, judge
from patches import holds, patched

BAD = [case for case in cases_in([CASES]) if not case.is_benign]
OP_LEVEL = [case for case in BAD if case.truth["phase"] in ("forward", "backward")]


def diagnosis_of(case: Case, watched: Any) -> dict[str, Any]:
    incidents = watched(case.folder / "train.py").incidents
    return incidents[0]["diagnosis"] if incidents else {}


@pytest.mark.parametrize("case", OP_LEVEL, ids=lambda case: case.name)
def test_a_change_that_is_shown_holds(case: Case, watched: Any) -> None:
    diagnosis = diagnosis_of(case, watched)
    if diagnosis.get("patch"):
        assert holds(case, patched(case, diagnosis["patch"])), diagnosis["patch"]
        assert any(said.startswith("With this change") for said in diagnosis["evidence"])


def test_a_change_is_shown_for_most_operations_that_go_wrong(watched: Any) -> None:
    shown = [case.name for case in OP_LEVEL if diagnosis_of(case, watched).get("patch")]
    assert len(shown) >= 0.75 * len(OP_LEVEL), shown


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_a_proven_diagnosis_is_right(case: Case, watched: Any) -> None:
    if diagnosis_of(case, watched).get("confidence") == "proven":
        assert judge(case, watched(case.folder / "train.py").incidents)["cause"]
