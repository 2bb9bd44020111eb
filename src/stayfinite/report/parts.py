"""The parts of a terminal report, one function each, in the order they are printed."""

from __future__ import annotations

import textwrap

from rich.text import Text

from stayfinite.records import REPEATED, REPEATS
from stayfinite.report import wording
from stayfinite.report.excerpt import SourceLine, excerpt
from stayfinite.report.layout import Lines, Page, Part, gutter, hang, long_row, row, rows, wrap
from stayfinite.report.tensors import table
from stayfinite.report.wording import plain

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
