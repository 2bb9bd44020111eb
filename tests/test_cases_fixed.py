"""The repaired script of each case trains to its end, and nothing is reported."""

from __future__ import annotations

from typing import Any

import pytest
from case_runs import CASES, Case, cases_in


@pytest.mark.parametrize("case", cases_in([CASES]), ids=lambda case: case.name)
def test_the_repaired_script_stays_finite(case: Case, watched: Any) -> None:
    finished = watched(case.folder / "train_fixed.py")
    assert finished.code == 0, finished.err
    assert not finished.incidents
    assert finished.result["exit"] == "finite"
