"""What a report shows of an incident: the excerpt of its source, its tensors, its words."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from rich.cells import cell_len

from stayfinite import text as wording
from stayfinite.records import Incident, Origin, TensorSummary
from stayfinite.text import visible

BEFORE = 2  # lines of context above the guilty one
GUILTY = 3  # guilty lines shown in full; the middle of a longer expression is left out


@dataclass(frozen=True, kw_only=True)
class SourceLine:
    """One line to show; `start` and `end` are the marked cells, equal where nothing is marked."""

    number: int | None
    text: str
    start: int = 0
    end: int = 0

    @property
    def parts(self) -> tuple[str, str, str]:
        """The text before the marked part, in it, and after it."""
        filled = list(accumulate(map(cell_len, self.text), initial=0))
        start, end = (
            next((at for at, cells in enumerate(filled) if cells >= edge), len(self.text))
            for edge in (self.start, self.end)
        )
        return self.text[:start], self.text[start:end], self.text[end:]


def excerpt(origin: Origin, *, folder: Path | None, width: int) -> list[SourceLine]:
    """The lines around the origin, each at most `width` cells; empty where no source is known."""
    lines = _file_lines(origin, folder)
    if lines is None:
        shown = _from_code(origin)
    else:
        shown = _context(lines, origin.line or 1) + _guilty(origin, lines)
    return [_crop(line, width) for line in shown]


def dedent(lines: Sequence[SourceLine]) -> list[SourceLine]:
    """The lines without the indentation that they share."""
    texts = [line.text for line in lines if line.text.strip() and line.number is not None]
    shared = min((len(text) - len(text.lstrip(" ")) for text in texts), default=0)
    found = []
    for line in lines:
        is_marked = line.start < line.end
        left = 0 if line.number is None else min(shared, line.start) if is_marked else shared
        cells = {"start": line.start - left, "end": line.end - left} if is_marked else {}
        found.append(replace(line, text=line.text[left:], **cells))
    return found


def _file_lines(origin: Origin, folder: Path | None) -> list[str] | None:
    """The file's lines, or None if it cannot be read or no longer holds the guilty code."""
    if origin.file is None or origin.line is None:
        return None
    path = origin.file
    if not path.startswith("<"):  # else a notebook cell
        path = str((folder or Path.cwd()) / path)
        try:
            if not Path(path).is_file():  # a device or a pipe would not end
                return None
        except (OSError, ValueError):
            return None
        linecache.checkcache(path)
    lines = [line.rstrip("\r\n") for line in linecache.getlines(path)]
    if not 1 <= origin.line <= len(lines):
        return None
    # The file may have been edited since.
    code = "".join(origin.code.split())
    there = "".join("".join(lines[_span(origin)]).split())
    return lines if code in there or (there and there in code) else None


def _span(origin: Origin) -> slice:
    first = origin.line or 1
    return slice(first - 1, max(first, origin.end_line or first))


def _from_code(origin: Origin) -> list[SourceLine]:
    """The recorded code itself, marked as a whole where it is the guilty expression."""
    code = origin.code.rstrip().split("\n") if origin.code.strip() else []
    length = origin.columns[1] - origin.columns[0] if origin.columns else -1
    is_whole = len(code) == 1 and len(code[0]) == length
    return [
        _line(None if origin.line is None else origin.line + at, text, 0, len(text) * is_whole)
        for at, text in enumerate(code[: GUILTY + 1])
    ]


def _context(lines: list[str], first: int) -> list[SourceLine]:
    above = range(max(1, first - BEFORE), first)
    shown = [_line(number, lines[number - 1]) for number in above]
    while shown and not shown[0].text.strip():
        shown.pop(0)
    return shown


def _guilty(origin: Origin, lines: list[str]) -> list[SourceLine]:
    first, texts = origin.line or 1, lines[_span(origin)]
    marked = []
    for at, text in enumerate(texts):
        start = end = 0
        if origin.columns is not None:
            start = origin.columns[0] if at == 0 else len(text) - len(text.lstrip())
            end = origin.columns[1] if at == len(texts) - 1 else len(text.rstrip())
            end = min(end, len(text))
        marked.append(_line(first + at, text, *((start, end) if 0 <= start < end else (0, 0))))
    if len(marked) <= GUILTY:
        return marked
    return [*marked[: GUILTY - 1], SourceLine(number=None, text="..."), marked[-1]]


def _line(number: int | None, text: str, first: int = 0, last: int = 0) -> SourceLine:
    """Characters to cells: tabs, escapes and wide characters take more than one."""
    shown = [visible(character) for character in text]
    start, end = (cell_len("".join(shown[:column])) for column in (first, last))
    return SourceLine(number=number, text="".join(shown).rstrip(), start=start, end=end)


def _crop(line: SourceLine, width: int) -> SourceLine:
    """At most `width` cells, with the marked part in view."""
    total, room = cell_len(line.text), max(width - 6, 1)  # two times "..."
    if total <= width:
        return line
    left = max(0, min(line.start - room // 3, total - room)) if line.end > room else 0
    cut, at, skipped = "", 0, 0  # the characters wholly between two cells, and the cells before
    for character in line.text:
        size = cell_len(character)
        if at < left:
            skipped = at + size
        elif at + size <= left + room:
            cut += character
        at += size
    head, tail = "..." if left else "", "..." if left + room < total else ""
    shift = len(head) - skipped
    end = min(line.end + shift, len(head) + cell_len(cut))
    start = min(line.start + shift, end)
    return SourceLine(number=line.number, text=head + cut + tail, start=start, end=end)


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """One tensor of the bad operation; `facts` are its numbers as text, by their heading."""

    role: str
    name: str
    remark: str
    facts: Mapping[str, str]
    tensor: TensorSummary


@dataclass(frozen=True, kw_only=True)
class IncidentView:
    """An incident in words; what is not known is empty."""

    incident: Incident
    headline: str
    spot: str
    library: str
    source: list[SourceLine]
    birth: str
    op: str
    tensors: list[TensorView]
    patch: list[str]


def view_of(incident: Incident, *, folder: Path | None, width: int) -> IncidentView:
    """`folder` is that of the script, `width` how many cells of a source line are shown."""
    origin, diagnosis = incident.origin, incident.diagnosis
    inputs = [("input", each) for each in origin.inputs] if origin else []
    outputs = [("output", each) for each in origin.outputs] if origin else []
    patch = (diagnosis.patch or "") if diagnosis else ""
    return IncidentView(
        incident=incident,
        headline=wording.headline(incident),
        spot=wording.spot(origin),
        library=wording.library(origin),
        source=excerpt(origin, folder=folder, width=width) if origin else [],
        birth=wording.birth(incident, origin) if origin else "",
        op=wording.full_op(origin) if origin else "",
        tensors=[
            TensorView(
                role=role,
                name=wording.plain(tensor.name),
                remark=wording.remark(tensor),
                facts={name: column(tensor) for name, column in wording.FULL.items()},
                tensor=tensor,
            )
            for role, tensor in [*inputs, *outputs]
        ],
        patch=[line for line in patch.split("\n") if line],
    )
