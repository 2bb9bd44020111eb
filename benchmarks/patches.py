"""How often a change of the source is offered for a real bug, and how often it holds.

    python benchmarks/patches.py [DIR...] [--jobs N] [--json FILE]

Every case (a folder with train.py and truth.json) is run once under `stayfinite run`. The change
that it shows is applied to a copy of the folder, which is then run by plain python: it holds when
the script ends well, every loss that it prints is finite, and the last ones are no worse than the
first ones or than those of train_fixed.py. A proven diagnosis is right when its cause is.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from case_runs import CASES, Case, Finished, cases_in, judge, run_plain, run_watched
from rich.console import Console
from rich.progress import track
from rich.table import Table

from stayfinite.patch.edit import apply, parse

_LOSS = re.compile(r"loss[ =:]+(\S+)")
Row = dict[str, Any]


def losses(finished: Finished) -> list[float]:
    """What the script printed, in order."""
    return [float(text) for text in _LOSS.findall(finished.out.decode(errors="replace"))]


def patched(case: Case, patch: str) -> Finished:
    """The script with the change, by plain python."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, case.name)
        shutil.copytree(case.folder, copy)
        changed = copy / parse(patch).name
        changed.write_text(apply(patch, changed.read_text()))
        return run_plain(copy / "train.py")


def holds(case: Case, finished: Finished) -> bool:
    """Whether it ends well, stays finite and learns."""
    seen = losses(finished)
    if finished.code != 0 or not seen or not all(map(math.isfinite, seen)):
        return False
    few = max(1, min(5, len(seen) // 2))
    first, last = statistics.median(seen[:few]), statistics.median(seen[-few:])
    if last <= first:
        return True
    right = losses(run_plain(case.folder / "train_fixed.py"))
    return bool(right) and last <= max(right[:few] + right[-few:]) + 0.5 * abs(right[-1])


def row_of(case: Case) -> Row:
    """What was offered for one case, and what became of it."""
    finished = run_watched(case.folder / "train.py")
    diagnosis = next(iter(finished.incidents), {}).get("diagnosis") or {}
    patch = diagnosis.get("patch")
    return {
        "phase": case.truth["phase"],
        "cause": diagnosis.get("cause"),
        "is_right": judge(case, finished.incidents)["cause"],
        "confidence": diagnosis.get("confidence"),
        "patch": patch,
        "evidence": diagnosis.get("evidence", []),
        "holds": holds(case, patched(case, patch)) if patch else None,
        "seconds": finished.seconds,
    }


def share(rows: list[Row], is_so: Any, among: Any) -> str:
    """ "7 of 9 (78%)"."""
    chosen = [row for row in rows if among(row)]
    hits = sum(bool(is_so(row)) for row in chosen)
    return f"{hits} of {len(chosen)} ({100 * hits / len(chosen):.0f}%)" if chosen else "none"


def table(rows: dict[str, Row]) -> Table:
    shown = Table(title="changes offered, and whether they hold")
    for heading in ("case", "phase", "cause", "right", "confidence", "offered", "holds", "s"):
        shown.add_column(heading)
    for name, row in rows.items():
        said = [row["phase"], str(row["cause"]), str(row["is_right"]), str(row["confidence"])]
        shown.add_row(
            name, *said, str(bool(row["patch"])), str(row["holds"]), f"{row['seconds']:.0f}"
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[CASES])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [case for case in cases_in(options.folders) if not case.is_benign]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = pool.map(row_of, cases)
        console = Console(stderr=True)
        names = [case.name for case in cases]
        rows = dict(zip(names, track(found, total=len(cases), console=console), strict=True))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    every = list(rows.values())
    Console().print(table(rows))

    def is_op_level(row: Row) -> bool:
        return row["phase"] in ("forward", "backward")

    for words, is_so, among in (
        ("offered, op-level bugs", lambda row: row["patch"], is_op_level),
        (
            "hold, of those offered for op-level bugs",
            lambda row: row["holds"],
            lambda row: is_op_level(row) and row["patch"],
        ),
        ("offered, all", lambda row: row["patch"], lambda row: True),
        ("hold, of all offered", lambda row: row["holds"], lambda row: row["patch"]),
        (
            "right, of the proven",
            lambda row: row["is_right"],
            lambda row: row["confidence"] == "proven",
        ),
    ):
        Console().print(f"{words}: {share(every, is_so, among)}")


if __name__ == "__main__":
    main()
