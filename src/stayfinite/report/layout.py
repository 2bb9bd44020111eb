"""Lines of a terminal report: gutters, hanging rows, and fitting into a fixed height."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from stayfinite.records import Incident

LIMIT = 30

Lines = list[Text]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some lines of the report, of which the first `least` are always shown."""

    lines: Lines
    least: int = 1


@dataclass(frozen=True, kw_only=True)
class Page:
    """What every part needs to know."""

    incident: Incident
    folder: Path | None
    verbose: bool
    console: Console
    width: int

    @property
    def gutter(self) -> int:
        origin = self.incident.origin
        return len(str(max(origin.line or 0, origin.end_line or 0))) + 1 if origin else 2


def gutter(page: Page, number: int | None = None) -> Text:
    """The line number and the bar; the bar alone without a number."""
    return Text.assemble((f"{'' if number is None else number:>{page.gutter}} |", "blue"))


def rows(page: Page, label: str, texts: list[str]) -> Lines:
    """One row each, the label on the first alone."""
    labels = [label, *[""] * len(texts)]
    pairs = zip(labels, texts, strict=False)
    return [line for name, text in pairs for line in row(page, name, Text(text))]


def row(page: Page, label: str, text: Text) -> Lines:
    """`= why: ...`, wrapped; nothing for an empty text."""
    return hang(page, _lead(page, label), text) if text else []


def long_row(page: Page, text: Text) -> Text:
    """A row on one line, however long: code that is to be copied."""
    line = _lead(page).append(text)
    line.no_wrap, line.overflow = True, "ignore"
    return line


def _lead(page: Page, label: str = "") -> Text:
    head = f"= {label}:" if label else ""
    return Text.assemble(" " * (page.gutter + 1), (f"{head:<8}", "bold"))


def hang(page: Page, lead: Text, text: Text) -> Lines:
    """The text after the lead, wrapped to stand under its own first word."""
    wrapped = wrap(page, text, width=max(page.width - lead.cell_len, 8))
    blank = Text(" " * lead.cell_len)
    return [(blank if i else lead).copy().append(line) for i, line in enumerate(wrapped)]


def wrap(page: Page, text: Text, *, width: int) -> Lines:
    lines = list(text.wrap(page.console, width))
    for line in lines:
        line.rstrip()
    return lines


def flat(parts: list[Part]) -> Lines:
    return [line for part in parts for line in part.lines]


def fit(parts: list[Part], page: Page) -> Lines:
    """At most LIMIT lines, as far as the parts can give lines up; says so if any were."""
    if len(flat(parts)) <= LIMIT:
        return flat(parts)
    sizes = _shrunk([len(part.lines) for part in parts], parts)
    kept = [line for size, part in zip(sizes, parts, strict=True) for line in part.lines[:size]]
    return [*kept, *row(page, "more", Text("shortened; --verbose shows all"))[:1]]


def _shrunk(sizes: list[int], parts: list[Part]) -> list[int]:
    """The part with most to give loses a line, until LIMIT less the closing row is reached."""
    while sum(sizes) >= LIMIT:
        spare = [size - part.least for size, part in zip(sizes, parts, strict=True)]
        longest = spare.index(max(spare))
        if spare[longest] <= 0:
            break
        sizes[longest] -= 1
    return sizes
