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
    lines = excerpt(origin, folder=folder, width=_LONGEST)
    texts = [line.text for line in lines if line.text.strip() and line.number is not None]
    shared = min((len(text) - len(text.lstrip(" ")) for text in texts), default=0)
    return [_split(line, shared) for line in lines]


def _split(line: SourceLine, shared: int) -> CodeLine:
    """Without the indentation that all lines share."""
    is_code = line.number is not None
    start, end = (_characters(line.text, cells) for cells in (line.start, line.end))
    left = min(shared, start) if start < end else shared
    return CodeLine(
        number=line.number,
        before=line.text[left if is_code else 0 : start if start < end else None],
        guilty=line.text[start:end],
        after=line.text[end:] if start < end else "",
        indent=max(line.start - left, 0),
    )


def _characters(text: str, cells: int) -> int:
    """How many characters fill so many cells of a terminal."""
    filled = 0
    for at, character in enumerate(text):
        if filled >= cells:
            return at
        filled += cell_len(character)
    return len(text)
