"""Two recorded runs side by side: before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stayfinite.report.store.reading import Run
from stayfinite.report.summary import Range, RunSummary, summary_of

_STEADY = 100  # steps; the pace of fewer is mostly that of the start


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measure of both runs; `better` is -1 where less is better, 1 where more is, else 0."""

    name: str
    before: Any
    after: Any
    better: int = 0


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that is not the same: an option, a version, a file."""

    kind: str
    name: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `stayfinite compare` tells."""

    before: str
    after: str
    lines: tuple[Line, ...]
    changes: tuple[Change, ...]


def compare(
    before: Run, after: Run, *, summarise: Callable[[Run], RunSummary] = summary_of
) -> Comparison:
    """What became of the first run in the second."""
    return Comparison(
        before=str(before.path),
        after=str(after.path),
        lines=tuple(_lines(summarise(before), summarise(after))),
        changes=tuple(_changes(before, after)),
    )


def _lines(old: RunSummary, new: RunSummary) -> Iterator[Line]:
    yield Line(name="ended", before=old.ended, after=new.ended)
    yield Line(name="steps", before=old.steps, after=new.steps)
    yield Line(name="bad steps", before=old.bad_steps, after=new.bad_steps, better=-1)
    yield Line(name="skipped steps", before=old.skipped_steps, after=new.skipped_steps, better=-1)
    yield from _ranged("gradient norm", old.norm, new.norm, ("high",), better=-1)
    yield from _ranged("gradient norm", old.norm, new.norm, ("median",))
    yield from _ranged("loss", old.loss, new.loss, ("low", "high", "last"), better=-1)
    for term in sorted({*old.terms, *new.terms}):
        found = old.terms.get(term), new.terms.get(term)
        yield from _ranged(f"loss term {term}", *found, ("low", "high", "last"), better=-1)
    yield from _ranged("loss scale", old.scale, new.scale, ("low", "high"))
    paces = old.seconds_per_step, new.seconds_per_step
    is_long = min(old.steps, new.steps) >= _STEADY
    yield Line(name="seconds per step", before=paces[0], after=paces[1], better=-int(is_long))
    yield Line(name="seconds", before=old.seconds, after=new.seconds)


_WORDS = {"low": "lowest", "high": "highest", "median": "median", "last": "last"}


def _ranged(
    name: str, old: Range | None, new: Range | None, parts: tuple[str, ...], *, better: int = 0
) -> Iterator[Line]:
    if old is None and new is None:
        return
    for part in parts:
        values = getattr(old, part, None), getattr(new, part, None)
        yield Line(name=f"{name}, {_WORDS[part]}", before=values[0], after=values[1], better=better)


def _changes(before: Run, after: Run) -> Iterator[Change]:
    old, new = before.info, after.info
    yield from _differences("option", old.config, new.config)
    yield from _differences("version", old.versions, new.versions)
    yield from _differences("file", old.sources, new.sources)
    facts = ("script", "command", "commit", "seed", "world", "python")
    yield from _differences(
        "run", {name: getattr(old, name) for name in facts}, {n: getattr(new, n) for n in facts}
    )


def _differences(kind: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield Change(kind=kind, name=name, before=old.get(name), after=new.get(name))
