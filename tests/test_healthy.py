"""Healthy scripts with things that look bad: no incident, and the same bytes as without us."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from case_runs import run_plain

SCRIPTS = sorted((Path(__file__).parent / "healthy").glob("*.py"))
LAST_LINE = re.compile(r"stayfinite: \d+ steps? checked, all finite( \(.*\))?\.")


def test_there_are_twenty_scripts() -> None:
    assert len(SCRIPTS) >= 20


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_healthy_script_runs_as_if_nobody_watched(script: Path, watched: Any) -> None:
    plain, finished = run_plain(script), watched(script)
    assert plain.code == 0, plain.err
    assert finished.code == 0, finished.err
    assert finished.out == plain.out
    assert finished.result["exit"] == "finite"
    assert finished.incidents == []
    assert LAST_LINE.fullmatch(finished.err.splitlines()[-1])
