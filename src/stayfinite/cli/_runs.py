"""Runs that are named on a command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stayfinite.cli._refusal import Refused
from stayfinite.errors import RecordError

if TYPE_CHECKING:
    from stayfinite.report.store.reading import Run


def run_at(path: Path | None) -> Run:
    """The run in this folder, or of this name in stayfinite-runs; without a path, the newest."""
    from stayfinite.report.store.environment import RUNS
    from stayfinite.report.store.reading import read_run, runs_in

    if path is None:
        found = runs_in(RUNS)
        if not found:
            raise Refused(f"there is no run in {RUNS}; name one, or make one: stayfinite run ...")
        path = found[0]
    elif not path.exists() and (Path(RUNS) / path).is_dir():
        path = Path(RUNS) / path
    try:
        return read_run(path)
    except RecordError as error:
        raise Refused(str(error)) from error
