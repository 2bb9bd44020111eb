"""Real bugs under `run --on-nan recover`: weights finite in all, training goes on in most."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
from case_runs import CASES, Case, cases_in
from filelock import FileLock
from recovery import Recovered, recover

ALL = [case for case in cases_in([CASES]) if not case.is_benign]
USEFUL = 0.9

Run = Callable[[Case], Recovered]
# One worker for all questions about a script (--dist loadgroup).
GROUPED = [
    pytest.param(case, id=case.name, marks=pytest.mark.xdist_group(f"recovered-{case.name}"))
    for case in ALL
]


@pytest.fixture(scope="session")
def recovered(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Run:
    """Runs a case; a second call for it gets the same result."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "recovered"
    folder.mkdir(exist_ok=True)

    def run(case: Case) -> Recovered:
        kept = folder / f"{case.name}.json"
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                kept.write_text(json.dumps(dataclasses.asdict(recover(case))))
            return Recovered(**json.loads(kept.read_text()))

    return run


def test_there_are_cases() -> None:
    assert len(ALL) >= 20


@pytest.mark.parametrize("case", GROUPED)
def test_the_weights_are_finite_at_the_end(case: Case, recovered: Run) -> None:
    ended = recovered(case)
    assert ended.is_finite, ended
    assert ended.strategies, "nothing was noticed"


@pytest.mark.parametrize("case", GROUPED)
def test_training_goes_on_or_stops_with_a_reason(case: Case, recovered: Run) -> None:
    ended = recovered(case)
    said_so = ended.code == 3 and "recovery failed: " in ended.last_words
    assert ended.code == 0 or ended.gave_up or said_so, ended


def test_training_goes_on_usefully_in_most(recovered: Run) -> None:
    # From the end: another worker may be at the tests above, and is not to wait for each.
    results = [recovered(case) for case in reversed(ALL)]
    useless = [each for each in results if not each.is_useful]
    assert len(useless) <= (1 - USEFUL) * len(ALL) + 1e-9, useless
