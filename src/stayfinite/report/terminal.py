"""The report in the terminal: laid out like a compiler error, at most thirty lines."""

from __future__ import annotations

import io
import os
import re
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
from stayfinite.records import REPEATED, REPEATS, Diagnosis, Incident, Origin, TensorSummary
from stayfinite.report.incident_view import excerpt
from stayfinite.text import BRIEF, FULL, plain, remark

WIDTH = 100  # where there is no terminal to ask
NARROWEST = 20
LIMIT = 30  # lines of a report that is not verbose
_MOST_EVIDENCE = 3  # pieces that are shown in a short report
_MOST_CHANGED = 6  # lines of a patch that are never cut: half a change cannot be made
_WIDEST = 28  # cells of one column of a table
_PLACE = re.compile(r"\S:\d+")  # train.py:46

Lines = list[Text]


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
    _print(render(incident, verbose=verbose, folder=folder), file or sys.stderr)


def _print(report: RenderableType, file: TextIO) -> None:
    asked = Console(file=file)
    is_bare = not asked.is_terminal or bool(os.environ.get("NO_COLOR"))
    console = Console(
        file=file,
        highlight=False,
        markup=False,
        emoji=False,
        width=asked.width if asked.is_terminal or "COLUMNS" in os.environ else WIDTH,
        color_system=None if is_bare else "auto",
    )
    with console.capture() as capture:
        console.print(report, crop=False)
    # A file that takes only ASCII must not turn a report into a UnicodeEncodeError.
    encoding = getattr(file, "encoding", None) or "utf-8"
    file.write(capture.get().encode(encoding, "backslashreplace").decode(encoding))
    file.flush()


def show_proof(incident: Incident, since: Incident, *, file: TextIO) -> None:
    """Print what is known of the incident now and was not when it was shown."""
    now, before = incident.diagnosis, since.diagnosis
    if now is None or now == before:
        return
    known = () if before is None else before.evidence
    new = tuple(each for each in now.evidence if each not in (*known, REPEATED))
    if not new and before is not None and before.confidence == now.confidence:
        return
    _print(_Proof(incident=incident, evidence=new), file)


def as_text(incident: Incident, *, verbose: bool = False, folder: Path | None = None) -> str:
    """The report as plain text."""
    page = io.StringIO()
    show(incident, verbose=verbose, folder=folder, file=page)
    return page.getvalue()


@dataclass(frozen=True, kw_only=True)
class _Report:
    incident: Incident
    folder: Path | None
    verbose: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Lines:
        layout = _Layout(self.incident.origin, max(options.max_width, NARROWEST))
        parts = [part for part in self._parts(layout) if part.lines]
        lines = [line for part in parts for line in part.lines]
        if self.verbose or len(lines) <= LIMIT:
            return lines
        sizes = _shrunk_sizes(parts)
        kept = [line for size, part in zip(sizes, parts, strict=True) for line in part.lines[:size]]
        return [*kept, *layout.row("more", "shortened; --verbose shows all")[:1]]

    def _parts(self, layout: _Layout) -> Iterator[_Section]:
        """From top to bottom."""
        incident, origin, diagnosis = self.incident, self.incident.origin, self.incident.diagnosis
        title = f"error[{plain(diagnosis.cause)}]" if diagnosis else "error"
        head = Text.assemble((title, "bold red"), (f": {wording.headline(incident)}", "bold"))
        yield _Section(layout.wrap(head, layout.width), least=2)
        arrow = Text.assemble((" " * (layout.margin - 1) + "--> ", "blue"))
        yield _Section(layout.hang(arrow, Text(wording.spot(origin))), least=2)
        if inner := wording.library(origin):
            yield _Section(layout.hang(Text(" " * arrow.cell_len), Text(inner)), least=2)
        if origin is not None:
            yield self._source(layout, origin)
            yield self._tensors(layout, origin)
            yield _Section(layout.row("op", wording.full_op(origin)))
        if diagnosis is not None:
            yield from self._advice(layout, diagnosis)
        hops = origin.lineage if origin is not None and self.verbose else ()
        path = [wording.hop_words(hop, first=at == 0) for at, hop in enumerate(hops)]
        yield _Section(layout.rows("path", path if self.verbose else [wording.way(incident)]))
        if origin is not None and not origin.exact:
            yield _Section(layout.row("note", wording.INFERRED))
        if diagnosis is not None:
            seen, trial = diagnosis.evidence, wording.trial_of(diagnosis)
            if trial:
                at = len(seen) - 1 - seen[::-1].index(trial)
                seen = (*seen[:at], *seen[at + 1 :])
            if not self.verbose:
                seen = tuple(t for t in seen if t not in (REPEATS, REPEATED))[:_MOST_EVIDENCE]
            yield _Section(layout.rows("seen", list(map(plain, seen))), least=0)
        bad = [report for report in incident.reports if report.has_nan and self.verbose]
        texts = [f"{wording.KINDS[report.nan_type]} in {wording.place(report)}" for report in bad]
        yield _Section(layout.rows("bad", texts), least=0)
        if incident.outcome is not None:
            yield _Section(layout.row("done", plain(wording.what_was_done(incident))))
        if diagnosis is not None:
            yield _Section(layout.row("see", f"stayfinite cause {plain(diagnosis.cause)}", "cyan"))

    def _source(self, layout: _Layout, origin: Origin) -> _Section:
        """The guilty lines, with what happened beside the marks if there is room, else below."""
        label, edge = Text(wording.birth(self.incident, origin), style="red"), layout.gutter()
        shown = excerpt(origin, folder=self.folder, width=layout.width - layout.margin - 3)
        lines: Lines = []
        for source in shown:
            lines.append(layout.gutter(source.number).append(f" {source.text}"))
            if source.start < source.end:
                marks = " " * (source.start + 1) + "^" * (source.end - source.start)
                lines.append(layout.gutter().append(marks, style="bold red"))
        if not lines and not origin.op:
            return _Section([edge])
        is_marked = bool(shown) and shown[-1].start < shown[-1].end
        if is_marked and lines[-1].cell_len + 1 + label.cell_len <= layout.width:
            lines[-1].append(" ").append(label)
        else:
            lines += layout.hang(layout.gutter().append(" "), label)
        return _Section([edge, *lines, edge], least=len(lines) + 1 if shown else 1)

    def _tensors(self, layout: _Layout, origin: Origin) -> _Section:
        """The inputs; the outputs too if verbose, or if there are no inputs."""
        if origin.inputs:
            found = _table("input", origin.inputs, self.verbose)
            found += _table("output", origin.outputs, self.verbose) if self.verbose else []
        else:
            found = _table("tensor", origin.outputs, self.verbose)
        lines = [layout.gutter().append(" ").append(each) for each in found]
        for line in lines:
            line.truncate(layout.width, overflow="ellipsis")
        return _Section([*lines, layout.gutter()] if lines else [], least=2)

    def _advice(self, layout: _Layout, diagnosis: Diagnosis) -> Iterator[_Section]:
        """Why, what to change, and what came of the change when it was tried."""
        sure = wording.CONFIDENCE[diagnosis.confidence]
        yield _Section(
            layout.row("why", Text.assemble((f"({sure}) ", "bold"), plain(diagnosis.why)))
        )
        patch = (diagnosis.patch or "").split("\n")
        fix = plain(diagnosis.fix) or ("apply this change" if diagnosis.patch else "")
        lines = layout.row("fix", fix, "green")
        yield _Section(lines, least=min(len(lines), 3))
        shown = list(filter(None, patch)) if self.verbose else _changed_lines(patch)
        lines = [layout.long_row(line) for line in shown]
        yield _Section(lines, least=min(len(lines), _MOST_CHANGED))
        yield _Section(layout.row("test", plain(wording.trial_of(diagnosis)), "green"))


@dataclass(frozen=True, kw_only=True)
class _Proof:
    """What was found out after a report was shown: how sure it is, and what a change did."""

    incident: Incident
    evidence: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Lines:
        layout = _Layout(self.incident.origin, max(options.max_width, NARROWEST))
        diagnosis = self.incident.diagnosis
        assert diagnosis is not None
        sure = f"{wording.CONFIDENCE[diagnosis.confidence]}: {plain(diagnosis.cause)}"
        lines, trial = layout.row("now", sure), wording.trial_of(diagnosis)
        if trial in self.evidence:
            changed = _changed_lines((diagnosis.patch or "").split("\n"))
            lines += [layout.long_row(line) for line in changed]
            lines += layout.row("test", plain(trial), "green")
        seen = [said for said in self.evidence if said != trial]
        return [*lines, *layout.rows("seen", list(map(plain, seen)))]


@dataclass(frozen=True)
class _Section:
    """Some lines of the report, of which the first `least` are always shown."""

    lines: Lines
    least: int = 1


def _shrunk_sizes(parts: list[_Section]) -> list[int]:
    """The part with most to give loses a line, until LIMIT less the closing row is reached."""
    sizes = [len(part.lines) for part in parts]
    while sum(sizes) >= LIMIT:
        spare = [size - part.least for size, part in zip(sizes, parts, strict=True)]
        longest = spare.index(max(spare))
        if spare[longest] <= 0:
            break
        sizes[longest] -= 1
    return sizes


class _Layout:
    """Places text right of a margin that has the line numbers."""

    def __init__(self, origin: Origin | None, width: int) -> None:
        self.width = width
        last = max(origin.line or 0, origin.end_line or 0) if origin else 0
        self.margin = len(str(last)) + 1
        files = [origin.file, *(hop.file for hop in origin.lineage)] if origin else []
        named = [plain(file) for file in files if file and " " in file]
        # A file whose name has spaces is one word, whole and without its folders; so is a quotient.
        named = [*named, *(name.rsplit("/", 1)[-1] for name in named), "0 / 0", "1 / 0", "x / 0"]
        named = sorted(named, key=len)[::-1]
        self._word = re.compile(f"(?:{'|'.join([*map(re.escape, named), r'[^ ]'])})+ *")

    def gutter(self, number: int | None = None) -> Text:
        """The line number and the bar; the bar alone without a number."""
        return Text.assemble((f"{'' if number is None else number:>{self.margin}} |", "blue"))

    def rows(self, label: str, texts: list[str]) -> Lines:
        """One row each, the label on the first alone."""
        found = [self.row("" if at else label, text) for at, text in enumerate(texts)]
        return [line for lines in found for line in lines]

    def row(self, label: str, text: str | Text, style: str = "") -> Lines:
        """`= why: ...`, wrapped; nothing for an empty text."""
        text = text if isinstance(text, Text) else Text(text, style=style)
        return self.hang(self._lead(label), text) if text else []

    def long_row(self, diff: str) -> Text:
        """A line of a change, however long: code that is to be copied."""
        line = self._lead().append(
            Text(plain(diff), style={"+": "green", "-": "red"}.get(diff[0], ""))
        )
        line.no_wrap, line.overflow = True, "ignore"
        return line

    def _lead(self, label: str = "") -> Text:
        head = f"= {label}:" if label else ""
        return Text.assemble(" " * (self.margin + 1), (f"{head:<8}", "bold"))

    def hang(self, lead: Text, text: Text) -> Lines:
        """The text after the lead, wrapped to stand under its own first word."""
        wrapped = self.wrap(text, max(self.width - lead.cell_len, 8))
        blank = Text(" " * lead.cell_len)
        lines = [(blank if i else lead).copy().append(line) for i, line in enumerate(wrapped)]
        for line in lines:
            line.no_wrap, line.overflow = True, "ignore"
        return lines

    def wrap(self, text: Text, width: int) -> Lines:
        """The text on lines of this width; a `path:line` is never broken, as it is to be copied."""
        starts, filled = [], 0
        for word in self._word.finditer(text.plain):
            size = cell_len(word.group().rstrip())
            if filled and filled + size > width:
                starts.append(word.start())
                filled = 0
            filled += cell_len(word.group())
            if size > width and not _PLACE.search(word.group()):
                folds = _folds(word.group(), width)
                starts += [word.start() + at for at in folds]
                filled = cell_len(word.group()[folds[-1] :])
        lines = list(text.divide(starts))
        for line in lines:
            line.rstrip()
        return lines


def _folds(word: str, width: int) -> list[int]:
    """Where a word that is too long is cut; one too long for a line only has at least one."""
    found, filled = [], 0
    for at, character in enumerate(word.rstrip()):
        size = cell_len(character)
        if filled + size > width:
            found.append(at)
            filled = 0
        filled += size
    return found


def _changed_lines(patch: list[str]) -> list[str]:
    """The changed lines alone, without the indentation that they share."""
    changed = [
        line
        for line in patch
        if line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))
    ]
    bodies = textwrap.dedent("\n".join(line[1:] for line in changed)).split("\n")
    return [f"{line[0]} {body}" for line, body in zip(changed, bodies, strict=bool(changed))]


def _table(title: str, tensors: tuple[TensorSummary, ...], verbose: bool) -> Lines:
    """A header, and a row for each."""
    if not tensors:
        return []
    columns = FULL if verbose else BRIEF
    rows = [[title, *columns, ""]]
    for tensor in tensors:
        numbers = [column(tensor) for column in columns.values()]
        rows.append([plain(tensor.name), *numbers, remark(tensor)])
    widths = [min(_WIDEST, max(map(cell_len, column))) for column in zip(*rows, strict=True)]
    styles = ["dim", *("red" if tensor.bad_count else "" for tensor in tensors)]
    lines = []
    for cells, style in zip(rows, styles, strict=True):
        padded = [
            set_cell_size(cell, width)
            if cell_len(cell) <= width
            else set_cell_size(cell, width - 3) + "..."
            for cell, width in zip(cells, widths, strict=True)
        ]
        lines.append(Text("  ".join(padded).rstrip(), style=style))
    return lines
