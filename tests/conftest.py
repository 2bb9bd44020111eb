"""Whole scripts, each run once for all tests and all workers."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # for case_runs

import case_runs
import forks
from case_runs import Finished, run_watched

case_runs.start_python = forks.run
Watched = Callable[[Path], Finished]


def pytest_collection_finish() -> None:
    """A test process has a million objects of frameworks and collected tests.

    Incidents and `check_data` look through the living objects, so these are put out of their sight.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Watched:
    """Runs a script under `stayfinite run`; a second call for it gets the same result."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "watched"
    folder.mkdir(exist_ok=True)

    def run(script: Path) -> Finished:
        kept = folder / f"{script.parent.name}-{script.stem}.pickle"
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                kept.write_bytes(pickle.dumps(dataclasses.asdict(run_watched(script))))
            return Finished(**pickle.loads(kept.read_bytes()))

    return run
