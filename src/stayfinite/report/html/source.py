"""The guilty lines for the page: which part is underlined, and what is said below it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len

from stayfinite.records import Origin
from stayfinite.report.excerpt import SourceLine, excerpt

_LONGEST = 400


@dataclass(frozen=True, kw_only=True)
class CodeLine:
    """A line in three parts, of which the middle is guilty; `indent` are the cells before it."""

    number: int | None
    before: str
    guilty: str
    after: str
    indent: int


def code_lines(origin: Origin | None, *, folder: Path | None) -> list[CodeLine]:
    """The lines around the origin; empty where no source is known."""
    if origin is None:
        return []
    return [_split(line) for line in excerpt(origin, folder=folder, width=_LONGEST)]


def _split(line: SourceLine) -> CodeLine:
    start, end = (_characters(line.text, cells) for cells in (line.start, line.end))
    return CodeLine(
        number=line.number,
        before=line.text[:start],
        guilty=line.text[start:end],
        after=line.text[end:],
        indent=line.start,
    )


def _characters(text: str, cells: int) -> int:
    """How many characters fill so many cells of a terminal."""
    filled = 0
    for at, character in enumerate(text):
        if filled >= cells:
            return at
        filled += cell_len(character)
    return len(text)
