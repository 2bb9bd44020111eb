"""Whole scripts, each run once for all tests and all workers."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # for case_runs

import case_runs
import forks
from case_runs import Finished, run_watched

Watched = Callable[[Path], Finished]
ANEW = ("ciou-flat-proposal/train.py", "healthy/cnn.py")  # as users start them
_start_anew = case_runs.start_python


def start_python(words: list[str], **how: Any) -> subprocess.CompletedProcess[bytes]:
    """A fork of a process that has torch, but for `run` of a few scripts."""
    is_anew = words[:3] == ["-m", "stayfinite", "run"] and words[-1].endswith(ANEW)
    return (_start_anew if is_anew else forks.run)(words, **how)


case_runs.start_python = start_python


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file of tests stays with one worker (--dist loadgroup), which makes its fixtures once."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish() -> None:
    """A test process has a million objects of frameworks and collected tests.

    Incidents and `check_data` look through the living objects, so these are put out of their sight.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """So is what a file of tests leaves behind: frameworks, compiled code, models in caches."""
    yield
    if nextitem is not None and nextitem.path != item.path:
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
