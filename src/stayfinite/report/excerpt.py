"""The guilty source lines: read, cropped, and with the guilty columns marked."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len

from stayfinite.records import Origin
from stayfinite.text import visible

BEFORE = 2  # lines of context above the guilty one
GUILTY = 3  # guilty lines shown in full; the middle of a longer expression is left out


@dataclass(frozen=True, kw_only=True)
class SourceLine:
    """One line to print; `start` and `end` are the marked cells, equal where nothing is marked."""

    number: int | None
    text: str
    start: int = 0
    end: int = 0


def excerpt(origin: Origin, *, folder: Path | None, width: int) -> list[SourceLine]:
    """The lines around the origin, each at most `width` cells; empty where no source is known."""
    lines = _read(origin, folder)
    if lines is None:
        return [_crop(line, width) for line in _from_code(origin)]
    first = origin.line or 1
    shown = _context(lines, first) + _guilty(origin, lines)
    return [_crop(line, width) for line in shown]


def _read(origin: Origin, folder: Path | None) -> list[str] | None:
    """The file's lines, or None if it cannot be read or no longer holds the guilty code."""
    if origin.file is None or origin.line is None:
        return None
    lines = [line.rstrip("\r\n") for line in _file_lines(origin.file, folder)]
    if not 1 <= origin.line <= len(lines):
        return None
    return lines if _agrees(origin, lines) else None


def _file_lines(file: str, folder: Path | None) -> list[str]:
    if file.startswith("<"):
        return linecache.getlines(file)  # a notebook cell
    path = str((folder or Path.cwd()) / file)
    try:
        if not Path(path).is_file():  # a device or a pipe would not end
            return []
    except (OSError, ValueError):
        return []
    linecache.checkcache(path)
    return linecache.getlines(path)


def _agrees(origin: Origin, lines: list[str]) -> bool:
    """Whether the recorded code is still there: the file may have been edited since."""
    code = "".join(origin.code.split())
    there = "".join("".join(lines[_span(origin)]).split())
    return code in there or (bool(there) and there in code)


def _span(origin: Origin) -> slice:
    first = origin.line or 1
    return slice(first - 1, max(first, origin.end_line or first))


def _from_code(origin: Origin) -> list[SourceLine]:
    """The recorded code itself, marked as a whole where it is the guilty expression."""
    code = origin.code.rstrip().split("\n") if origin.code.strip() else []
    length = origin.columns[1] - origin.columns[0] if origin.columns else -1
    whole = len(code) == 1 and len(code[0]) == length
    numbers = range(origin.line or 1, (origin.line or 1) + len(code))
    known = origin.line is not None
    lines = [
        _line(number if known else None, text, (0, len(text)) if whole else (0, 0))
        for number, text in zip(numbers, code, strict=True)
    ]
    return lines[: GUILTY + 1]


def _context(lines: list[str], first: int) -> list[SourceLine]:
    above = range(max(1, first - BEFORE), first)
    shown = [_line(number, lines[number - 1], (0, 0)) for number in above]
    while shown and not shown[0].text.strip():
        shown.pop(0)
    return shown


def _guilty(origin: Origin, lines: list[str]) -> list[SourceLine]:
    first = origin.line or 1
    texts = lines[_span(origin)]
    marked = [
        _line(first + i, text, _columns(origin, text, at=i, last=len(texts) - 1))
        for i, text in enumerate(texts)
    ]
    if len(marked) <= GUILTY:
        return marked
    return [*marked[: GUILTY - 1], SourceLine(number=None, text="..."), marked[-1]]


def _columns(origin: Origin, text: str, *, at: int, last: int) -> tuple[int, int]:
    """The guilty part of one line of the expression, in characters."""
    if origin.columns is None:
        return (0, 0)
    indent = len(text) - len(text.lstrip())
    start = origin.columns[0] if at == 0 else indent
    end = origin.columns[1] if at == last else len(text.rstrip())
    end = min(end, len(text))
    return (start, end) if 0 <= start < end else (0, 0)


def _line(number: int | None, text: str, columns: tuple[int, int]) -> SourceLine:
    """Characters to cells: tabs, escapes and wide characters take more than one."""
    shown = [visible(character) for character in text]
    start, end = (cell_len("".join(shown[:column])) for column in columns)
    return SourceLine(number=number, text="".join(shown).rstrip(), start=start, end=end)


def _crop(line: SourceLine, width: int) -> SourceLine:
    """At most `width` cells, with the marked part in view."""
    total, room = cell_len(line.text), max(width - 6, 1)  # two times "..."
    if total <= width:
        return line
    left = max(0, min(line.start - room // 3, total - room)) if line.end > room else 0
    cut, skipped = _cells(line.text, left, left + room)
    head = "..." if left else ""
    tail = "..." if left + room < total else ""
    shift = len(head) - skipped
    end = min(line.end + shift, len(head) + cell_len(cut))
    start = min(line.start + shift, end)
    return SourceLine(number=line.number, text=head + cut + tail, start=start, end=end)


def _cells(text: str, left: int, right: int) -> tuple[str, int]:
    """The characters wholly between two cells, and the cells skipped before them."""
    kept, at, skipped = [], 0, 0
    for character in text:
        size = cell_len(character)
        if at < left:
            skipped = at + size
        elif at + size <= right:
            kept.append(character)
        at += size
    return "".join(kept), skipped


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
