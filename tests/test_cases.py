"""Real bugs as small training scripts: each one is found, placed and explained."""

from __future__ import annotations

from typing import Any

import pytest
from case_runs import ASPECTS, CASES, Case, cases_in, judge

ALL = cases_in([CASES])
BAD = [case for case in ALL if not case.is_benign]
BENIGN = [case for case in ALL if case.is_benign]


def scored(case: Case) -> list[str]:
    """What the truth says something about; the step is scored in the benchmark only."""
    verdict = judge(case, [])
    return [aspect for aspect in ASPECTS if aspect != "step" and verdict[aspect] is not None]


def one_worker(case: Case, *more: Any) -> Any:
    """For all questions about a script (--dist loadgroup)."""
    name = "-".join((case.name, *more))
    return pytest.param(case, *more, id=name, marks=pytest.mark.xdist_group(case.name))


def test_there_are_cases() -> None:
    assert len(BAD) >= 20
    assert BENIGN


@pytest.mark.parametrize(
    ("case", "aspect"), [one_worker(case, aspect) for case in BAD for aspect in scored(case)]
)
def test_the_answer_is_right(case: Case, aspect: str, watched: Any) -> None:
    finished = watched(case.folder / "train.py")
    assert judge(case, finished.incidents)[aspect], explained(case, finished)


@pytest.mark.parametrize("case", [*map(one_worker, BAD)])
def test_an_incident_ends_the_script_with_code_3(case: Case, watched: Any) -> None:
    finished = watched(case.folder / "train.py")
    assert finished.code == 3, finished.err
    assert finished.result["exit"] == "incident"
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("case", [*map(one_worker, ALL)])
def test_no_file_of_the_user_is_changed(case: Case, watched: Any) -> None:
    assert watched(case.folder / "train.py").changed == ()


@pytest.mark.parametrize("case", [*map(one_worker, BENIGN)])
def test_a_benign_case_has_no_incident(case: Case, watched: Any) -> None:
    finished = watched(case.folder / "train.py")
    assert finished.code == 0, finished.err
    assert finished.result["exit"] == "finite"
    assert not finished.incidents


def explained(case: Case, finished: Any) -> str:
    """What was expected and what was said."""
    keys = ("op", "line", "module", "cause", "rank")
    truth = {key: value for key, value in case.truth.items() if key.removesuffix("_alt") in keys}
    return f"expected {truth}\n{finished.err}"
