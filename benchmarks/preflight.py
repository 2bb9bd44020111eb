"""How often preflight flags the guilty line before the first bad step, and how often it cries wolf.

    python benchmarks/preflight.py [DIR...] [--fixed] [--json FILE]

Every case (a folder with train.py and truth.json) is run up to its second update. A case counts if
its truth has an operation and a line; it is flagged if a risk of level high or medium is on that
line. With --fixed the same is asked of the repaired scripts, whose line should be quiet. The
healthy scripts should have no warning; one each is allowed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from case_runs import CASES, ROOT, Case, accepted, cases_in
from preflight_runs import Flight, preflights
from rich.console import Console
from rich.table import Table

HEALTHY = ROOT / "tests" / "healthy"
Row = dict[str, Any]


def row(case: Case, script: str, flight: Flight) -> Row:
    """What a preflight of one case said, beside its truth."""
    lines = {f"{script}:{line}" for line in accepted(case.truth, "line")}
    hits = [risk for risk in flight.warnings if risk["where"] in lines]
    causes = accepted(case.truth, "cause")
    return {
        "case": case.name,
        "counts": is_scored(case),
        "flagged": bool(hits),
        "cause": any(risk["cause"] in causes for risk in hits),
        "said": f"{hits[0]['level']} {hits[0]['cause']}" if hits else "",
        "warnings": len(flight.warnings),
        "risks": len(flight.risks),
        "code": flight.code,
        "seconds": round(flight.seconds, 1),
    }


def is_scored(case: Case) -> bool:
    """Whether one operation on one line is guilty."""
    return bool(case.truth["op"]) and bool(case.truth["line"]) and not case.is_benign


def rows_of(cases: list[Case], script: str) -> list[Row]:
    flights = preflights([case.folder / script for case in cases])
    return [row(case, script, flight) for case, flight in zip(cases, flights, strict=True)]


def healthy_rows() -> list[Row]:
    scripts = sorted(HEALTHY.glob("*.py"))
    return [
        {
            "case": script.stem,
            "warnings": len(flight.warnings),
            "said": ", ".join(f"{r['where']} {r['cause']}" for r in flight.warnings),
            "risks": len(flight.risks),
            "code": flight.code,
            "seconds": round(flight.seconds, 1),
        }
        for script, flight in zip(scripts, preflights(scripts), strict=True)
    ]


def totals(rows: list[Row]) -> dict[str, int]:
    scored = [each for each in rows if each["counts"]]
    return {
        "of": len(scored),
        "flagged": sum(each["flagged"] for each in scored),
        "with the right cause": sum(each["cause"] for each in scored),
    }


def case_table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title)
    for column in ("case", "guilty line flagged", "as", "warnings", "risks", "s"):
        table.add_column(column)
    for each in rows:
        mark = ("yes" if each["flagged"] else "[red]no[/]") if each["counts"] else "-"
        numbers = (str(each[key]) for key in ("warnings", "risks", "seconds"))
        table.add_row(each["case"], mark, each["said"], *numbers)
    found = totals(rows)
    table.add_section()
    cause = f"{found['with the right cause']} with the right cause"
    warnings = sum(each["warnings"] for each in rows)
    table.add_row("all", f"{found['flagged']} of {found['of']}", cause, str(warnings), "", "")
    return table


def healthy_table(rows: list[Row]) -> Table:
    table = Table(title="healthy scripts")
    for column in ("script", "warnings", "which", "risks", "s"):
        table.add_column(column)
    for each in rows:
        numbers = (str(each[key]) for key in ("risks", "seconds"))
        table.add_row(each["case"], str(each["warnings"]), each["said"], *numbers)
    table.add_section()
    most, total = max(e["warnings"] for e in rows), sum(e["warnings"] for e in rows)
    table.add_row("all", f"{total}, at most {most} each", "", "", "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folders", nargs="*", type=Path, default=[CASES])
    parser.add_argument("--fixed", action="store_true", help="the repaired scripts too")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    chosen = parser.parse_args()
    console, results = Console(), {}
    cases = cases_in(chosen.folders)
    results["cases"] = rows_of(cases, "train.py")
    console.print(case_table("cases, before their first bad step", results["cases"]))
    if chosen.fixed:
        results["fixed"] = rows_of(cases, "train_fixed.py")
        console.print(case_table("the same cases, repaired: less is better", results["fixed"]))
    results["healthy"] = healthy_rows()
    console.print(healthy_table(results["healthy"]))
    if chosen.json is not None:
        summary = {name: totals(rows) for name, rows in results.items() if name != "healthy"}
        chosen.json.write_text(json.dumps({"totals": summary, **results}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
