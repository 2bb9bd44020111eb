"""The report in the terminal: laid out like a compiler error, at most thirty lines."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from stayfinite import text as wording
from stayfinite.records import REPEATED, REPEATS, Incident, Origin, TensorSummary
from stayfinite.report.excerpt import SourceLine, excerpt
from stayfinite.text import BRIEF, FULL, Column, plain, remark

WIDTH = 100  # where there is no terminal to ask
NARROWEST = 20


@dataclass(frozen=True, kw_only=True)
class _Report:
    incident: Incident
    folder: Path | None
    verbose: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        page = Page(
            incident=self.incident,
            folder=self.folder,
            verbose=self.verbose,
            console=console,
            width=max(options.max_width, NARROWEST),
        )
        parts = [part for make in PARTS if (part := make(page)).lines]
        yield from flat(parts) if self.verbose else fit(parts, page)


def render(
    incident: Incident, *, verbose: bool = False, folder: Path | None = None
) -> RenderableType:
    """The incident as something rich can print.

    `folder` is the script's folder, against which the origin's file is resolved; the
    working directory if None.
    """
    return _Report(incident=incident, folder=folder, verbose=verbose)


def show(
    incident: Incident,
    *,
    verbose: bool = False,
    folder: Path | None = None,
    file: TextIO | None = None,
) -> None:
    """Print the incident, by default to stderr; plain text where that is not a terminal."""
    file = file or sys.stderr
    console = _console(file)
    with console.capture() as capture:
        console.print(render(incident, verbose=verbose, folder=folder), crop=False)
    # A file that takes only ASCII must not turn a report into a UnicodeEncodeError.
    encoding = getattr(file, "encoding", None) or "utf-8"
    file.write(capture.get().encode(encoding, "backslashreplace").decode(encoding))
    file.flush()


def as_text(incident: Incident, *, verbose: bool = False, folder: Path | None = None) -> str:
    """The report as plain text."""
    page = io.StringIO()
    show(incident, verbose=verbose, folder=folder, file=page)
    return page.getvalue()


def _console(file: TextIO) -> Console:
    asked = Console(file=file)
    bare = not asked.is_terminal or bool(os.environ.get("NO_COLOR"))
    known = asked.is_terminal or "COLUMNS" in os.environ
    return Console(
        file=file,
        highlight=False,
        markup=False,
        emoji=False,
        width=asked.width if known else WIDTH,
        color_system=None if bare else "auto",
    )


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


NOTHING = Part(lines=[], least=0)
_MOST_EVIDENCE = 3  # pieces that are shown in a short report
_MOST_CHANGED = 6  # lines of a patch that are never cut: half a change cannot be made


def _headline(page: Page) -> Part:
    diagnosis = page.incident.diagnosis
    cause = f"[{plain(diagnosis.cause)}]" if diagnosis else ""
    text = Text.assemble(
        (f"error{cause}", "bold red"), (f": {wording.headline(page.incident)}", "bold")
    )
    return Part(lines=wrap(page, text, width=page.width), least=2)


def _spot(page: Page) -> Part:
    arrow = Text.assemble((" " * (page.gutter - 1) + "--> ", "blue"))
    text = Text(wording.spot(page.incident.origin))
    return Part(lines=hang(page, arrow, text), least=2)


def _source(page: Page) -> Part:
    origin = page.incident.origin
    if origin is None:
        return NOTHING
    room = page.width - page.gutter - 3
    shown = excerpt(origin, folder=page.folder, width=room)
    lines = [line for source in shown for line in _numbered(page, source)]
    label, edge = Text(wording.birth(page.incident, origin), style="red"), gutter(page)
    if not lines:
        told = hang(page, gutter(page).append(" "), label) if origin.op else []
        return Part(lines=[edge, *told, edge] if told else [edge])
    lines += _label(page, label, lines.pop(), shown[-1])
    return Part(lines=[edge, *lines, edge], least=len(lines) + 1)


def _numbered(page: Page, source: SourceLine) -> Lines:
    line = gutter(page, source.number).append(f" {source.text}")
    if source.start >= source.end:
        return [line]
    marks = " " * (source.start + 1) + "^" * (source.end - source.start)
    return [line, gutter(page).append(marks, style="bold red")]


def _label(page: Page, label: Text, last: Text, source: SourceLine) -> Lines:
    """What happened, beside the marks if there is room, else below them."""
    marked = source.start < source.end
    if marked and last.cell_len + 1 + label.cell_len <= page.width:
        return [last.append(" ").append(label)]
    return [last, *hang(page, gutter(page).append(" "), label)]


def _tensors(page: Page) -> Part:
    origin = page.incident.origin
    if origin is None:
        return NOTHING
    found = table(origin, verbose=page.verbose)
    lines = [gutter(page).append(" ").append(each) for each in found]
    for line in lines:
        line.truncate(page.width, overflow="ellipsis")
    return Part(lines=[*lines, gutter(page)] if lines else [], least=2)


def _why(page: Page) -> Part:
    diagnosis = page.incident.diagnosis
    if diagnosis is None:
        return NOTHING
    sure = wording.CONFIDENCE[diagnosis.confidence]
    text = Text.assemble((f"({sure}) ", "bold"), plain(diagnosis.why))
    return Part(lines=row(page, "why", text))


def _fix(page: Page) -> Part:
    diagnosis = page.incident.diagnosis
    if diagnosis is None or not (diagnosis.fix or diagnosis.patch):
        return NOTHING
    text = Text(plain(diagnosis.fix) or "apply this change", style="green")
    lines = row(page, "fix", text)
    return Part(lines=lines, least=min(len(lines), 3))


def _patch(page: Page) -> Part:
    diagnosis = page.incident.diagnosis
    patch = (diagnosis.patch or "").split("\n") if diagnosis else []
    shown = [line for line in patch if line] if page.verbose else _changes(patch)
    lines = [long_row(page, _diff_line(text)) for text in shown]
    return Part(lines=lines, least=min(len(lines), _MOST_CHANGED))


def _tried(page: Page) -> Part:
    diagnosis = page.incident.diagnosis
    if diagnosis is None or not (diagnosis.patch and diagnosis.evidence):
        return NOTHING
    return Part(lines=row(page, "test", Text(plain(diagnosis.evidence[-1]), style="green")))


def _changes(patch: list[str]) -> list[str]:
    """The changed lines alone, without the indentation that they share."""
    changed = [line for line in patch if _is_change(line)]
    bodies = textwrap.dedent("\n".join(line[1:] for line in changed)).split("\n")
    return [f"{line[0]} {body}" for line, body in zip(changed, bodies, strict=bool(changed))]


def _is_change(line: str) -> bool:
    return line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))


def _diff_line(line: str) -> Text:
    style = {"+": "green", "-": "red"}.get(line[0], "")
    return Text(plain(line), style=style)


def _way(page: Page) -> Part:
    if not page.verbose:
        text = wording.way(page.incident)
        return Part(lines=row(page, "path", Text(text)))
    hops = page.incident.origin.lineage if page.incident.origin else ()
    texts = [wording.hop_words(hop, first=i == 0) for i, hop in enumerate(hops)]
    return Part(lines=rows(page, "path", texts))


def _note(page: Page) -> Part:
    origin = page.incident.origin
    if origin is None or origin.exact:
        return NOTHING
    return Part(lines=row(page, "note", Text(wording.INFERRED)))


def _names(page: Page) -> Part:
    text = wording.full_op(page.incident.origin) if page.incident.origin else ""
    return Part(lines=row(page, "op", Text(text)))


def _evidence(page: Page) -> Part:
    diagnosis = page.incident.diagnosis
    if diagnosis is None:
        return NOTHING
    shown = diagnosis.evidence[:-1] if diagnosis.patch else diagnosis.evidence
    if not page.verbose:
        shown = tuple(text for text in shown if text not in (REPEATS, REPEATED))[:_MOST_EVIDENCE]
    return Part(lines=rows(page, "seen", [plain(text) for text in shown]), least=0)


def _reports(page: Page) -> Part:
    bad = [report for report in page.incident.reports if report.has_nan and page.verbose]
    texts = [f"{wording.KINDS[report.nan_type]} in {wording.place(report)}" for report in bad]
    return Part(lines=rows(page, "bad", texts), least=0)


def _done(page: Page) -> Part:
    outcome = page.incident.outcome
    if outcome is None:
        return NOTHING
    strategy = "" if outcome.strategy == "none" else plain(outcome.strategy)
    text = ": ".join(filter(None, (strategy, plain(outcome.detail))))
    return Part(lines=row(page, "done", Text(text)))


def _link(page: Page) -> Part:
    diagnosis = page.incident.diagnosis
    if diagnosis is None:
        return NOTHING
    text = Text(f"stayfinite cause {plain(diagnosis.cause)}", style="cyan")
    return Part(lines=row(page, "see", text))


PARTS = (
    _headline,
    _spot,
    _source,
    _tensors,
    _names,
    _why,
    _fix,
    _patch,
    _tried,
    _way,
    _note,
    _evidence,
    _reports,
    _done,
    _link,
)


WIDEST = 28  # cells of one column


def table(origin: Origin, *, verbose: bool) -> list[Text]:
    """A header and a row per input; the outputs too if verbose, or if there are no inputs."""
    if not origin.inputs:
        return _block("tensor", origin.outputs, verbose=verbose)
    lines = _block("input", origin.inputs, verbose=verbose)
    return lines + (_block("output", origin.outputs, verbose=verbose) if verbose else [])


def _block(title: str, tensors: tuple[TensorSummary, ...], *, verbose: bool) -> list[Text]:
    if not tensors:
        return []
    columns = FULL if verbose else BRIEF
    rows = [[title, *columns, ""], *(_cells(tensor, columns) for tensor in tensors)]
    widths = [min(WIDEST, max(map(cell_len, column))) for column in zip(*rows, strict=True)]
    styles = ["dim", *("red" if tensor.bad_count else "" for tensor in tensors)]
    return [_row(row, widths, style) for row, style in zip(rows, styles, strict=True)]


def _cells(tensor: TensorSummary, columns: dict[str, Column]) -> list[str]:
    return [plain(tensor.name), *(column(tensor) for column in columns.values()), remark(tensor)]


def _row(cells: list[str], widths: list[int], style: str) -> Text:
    padded = [_pad(cell, width) for cell, width in zip(cells, widths, strict=True)]
    return Text("  ".join(padded).rstrip(), style=style)


def _pad(cell: str, width: int) -> str:
    if cell_len(cell) > width:
        return set_cell_size(cell, width - 3) + "..."
    return set_cell_size(cell, width)
