"""What `run` says: single lines on stderr, and the names of counts."""

from __future__ import annotations

import contextlib
import sys

from stayfinite.records import Incident
from stayfinite.report.sinks import beside_bars


def say(line: str) -> None:
    """Print one line of ours on stderr; a closed or broken stderr is no reason to fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError), beside_bars():
        sys.stderr.write(f"stayfinite: {line}\n")
        sys.stderr.flush()


def count(number: int, noun: str) -> str:
    """The number with its noun: "1 step", "12 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def one_line(incident: Incident) -> str:
    """The incident in one line: which step and rank, what was seen, and where if that is known."""
    is_one_of_many = incident.rank > 0 or (incident.rank == 0 and incident.world > 1)
    rank = f", rank {incident.rank}" if is_one_of_many else ""
    seen = ", ".join(f"{r.location} is {r.nan_type.word}" for r in incident.reports[:1])
    others = len(incident.reports) - 1
    are = "is" if others == 1 else "are"
    more = f" and {count(others, 'more tensor')} {are} not finite" if others > 0 else ""
    origin = incident.origin
    place = f", at {origin.file}:{origin.line}" if origin and origin.file else ""
    return f"step {incident.step}{rank}: {seen or 'a value is not finite'}{more}{place}"


def what_was_done(incident: Incident) -> str:
    """The outcome in a few words."""
    outcome = incident.outcome
    if outcome is None:
        return "nothing was done"
    strategy = "" if outcome.strategy == "none" else outcome.strategy
    return ": ".join(filter(None, (strategy, outcome.detail))) or "nothing was done"
