"""How often the line, operation, module and cause of a real bug are named, beside peers.

    python benchmarks/accuracy.py [DIR...] [--peers [PEER...]] [--fixed] [--only ID...]
                                  [--jobs N] [--json FILE]

Every case (a folder with train.py and truth.json) runs in a process of its own, from an empty
folder, unchanged. The first incident is judged. A benign case counts only under "found", where
no incident is the right answer. Steps are right within two, as scripts count in their own ways.
Peers get help that a user would have to give by hand; see benchmarks/peers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from case_runs import ASPECTS, CASES, Case, Finished, Verdict, cases_in, judge, run_watched
from peers import PEERS
from peers.peer import Peer
from rich.console import Console
from rich.progress import track
from rich.table import Table

OURS = "stayfinite"
Row = dict[str, Any]


def ours(case: Case, timeout: float) -> Row:
    """Our verdict on one case, with what was answered."""
    finished = run_watched(case.folder / "train.py", timeout=timeout)
    incident = next(iter(finished.incidents), {})
    origin, diagnosis = incident.get("origin") or {}, incident.get("diagnosis") or {}
    keys = ("file", "line", "op", "node", "module", "root", "exact")
    return {
        "verdict": judge(case, finished.incidents),
        "answer": {
            "step": incident.get("step"),
            "rank": incident.get("rank"),
            **{key: origin.get(key) for key in keys},
            "cause": diagnosis.get("cause"),
            "confidence": diagnosis.get("confidence"),
        },
        **_ending(finished),
    }


def fixed(case: Case, timeout: float) -> Row:
    """The repaired script: no incident, and exit code 0."""
    finished = run_watched(case.folder / "train_fixed.py", timeout=timeout)
    is_quiet = finished.result is not None and not finished.incidents and finished.code == 0
    return {"verdict": {"stays finite": is_quiet}, **_ending(finished)}


def _ending(finished: Finished) -> Row:
    wrong = "" if finished.code in (0, 3) else finished.err[-2000:]
    return {"code": finished.code, "seconds": round(finished.seconds, 1), "stderr": wrong}


def measure(
    cases: list[Case], run: Callable[[Case, float], Row], *, jobs: int, timeout: float, title: str
) -> dict[str, Row]:
    with ThreadPoolExecutor(jobs) as pool:
        rows = pool.map(lambda case: run(case, timeout), cases)
        shown = track(rows, description=title, total=len(cases), console=Console(stderr=True))
        return {case.name: row for case, row in zip(cases, shown, strict=True)}


def totals(verdicts: Iterable[Verdict]) -> dict[str, float | None]:
    """Percent right of those that are scored."""
    counted: dict[str, list[bool]] = {}
    for verdict in verdicts:
        for aspect, right in verdict.items():
            counted.setdefault(aspect, []).extend([] if right is None else [right])
    return {key: 100 * sum(found) / len(found) if found else None for key, found in counted.items()}


def table(title: str, rows: dict[str, Row]) -> Table:
    shown = Table(title=title)
    shown.add_column("case")
    verdicts = [row["verdict"] for row in rows.values()]
    share = totals(verdicts)
    aspects = [key for key in (*ASPECTS, "stays finite") if share.get(key) is not None]
    for aspect in aspects:
        shown.add_column(aspect, justify="center")
    shown.add_column("s", justify="right")
    for name, row in rows.items():
        marks = (_mark(row["verdict"].get(aspect), aspect, row) for aspect in aspects)
        shown.add_row(name, *marks, f"{row['seconds']:.0f}")
    shown.add_section()
    shown.add_row("right", *(f"{share[aspect]:.0f}%" for aspect in aspects), "")
    return shown


def _mark(right: bool | None, aspect: str, row: Row) -> str:
    if right is None:
        return "-"
    answer = row.get("answer", {}).get(aspect, "")
    return "yes" if right else f"[red]no[/] {'' if answer is None else answer}".rstrip()


def summary(results: dict[str, dict[str, Row]], notes: dict[str, str]) -> Table:
    """All contestants in one table, one line each."""
    shown = Table(title="right answers", caption="n/a: it does not answer that question")
    for column in ("", *ASPECTS):
        shown.add_column(column, justify="center" if column else "left")
    for name, rows in results.items():
        share = totals(row["verdict"] for row in rows.values())
        cells = [share.get(aspect) for aspect in ASPECTS]
        shown.add_row(name, *("n/a" if c is None else f"{c:.0f}%" for c in cells))
    for name, note in notes.items():
        shown.add_row(name, note)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[CASES], metavar="DIR")
    names = [peer.module.removeprefix("peers.") for peer in PEERS]
    parser.add_argument(
        "--peers", nargs="*", choices=names, metavar="PEER", help=f"of {names}; without a name: all"
    )
    parser.add_argument("--no-ours", action="store_true", help="do not measure ourselves")
    parser.add_argument("--fixed", action="store_true", help="run the repaired scripts too")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these cases")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    options = parser.parse_args()
    cases = cases_in(options.folders)
    if options.only:
        cases = [case for case in cases if case.name in options.only]
    if not cases:
        parser.error("no case there; a case is a folder with train.py and truth.json.")
    report(cases, options)


def chosen(names: list[str] | None) -> list[Peer]:
    """None: no peers; no names: all of them."""
    if names is None:
        return []
    return [peer for peer in PEERS if not names or peer.module.removeprefix("peers.") in names]


def report(cases: list[Case], options: argparse.Namespace) -> None:
    console = Console(width=None if sys.stdout.isatty() else 130)
    how = {"jobs": options.jobs, "timeout": options.timeout}
    results: dict[str, dict[str, Row]] = {}
    notes: dict[str, str] = {}
    if not options.no_ours:
        results[OURS] = measure(cases, ours, title=OURS, **how)
        console.print(table(OURS, results[OURS]))
    for peer in chosen(options.peers):
        if peer.missing():
            notes[peer.name] = peer.missing()
            continue
        results[peer.name] = measure(cases, peer.run, title=peer.name, **how)
        console.print(table(peer.name, results[peer.name]))
        if failed := sum(bool(row["failed"]) for row in results[peer.name].values()):
            console.print(f"{peer.name} itself failed on {failed} of {len(cases)}.")
    if options.peers is not None:
        console.print(summary(results, notes))
    repaired = measure(cases, fixed, title="repaired", **how) if options.fixed else {}
    if repaired:
        console.print(table("repaired scripts", repaired))
    if options.json:
        shares = {
            name: totals(row["verdict"] for row in rows.values()) for name, rows in results.items()
        }
        data = {"totals": shares, "cases": results, "fixed": repaired, "notes": notes}
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
