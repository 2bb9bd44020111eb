"""The page of a run, and the incidents of a guard as a piece of one."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from stayfinite import text as wording
from stayfinite.causes import CAUSES
from stayfinite.records import Forecast, Incident
from stayfinite.report.html.charts import (
    Plot,
    Window,
    around,
    doublings_left,
    heat_map,
    histogram,
    lineage,
    short,
    timeline,
    visible_text,
)
from stayfinite.report.html.notebook import info_without_source, without_source
from stayfinite.report.incident_view import IncidentView, dedent, view_of
from stayfinite.report.run_summary import summary_of
from stayfinite.report.store.reading import Run, Series
from stayfinite.report.store.writer import RunInfo

TEMPLATES = Path(__file__).with_name("templates")
_MOST_SHOWN = 20  # incidents in full; the list has them all
_MOST_LISTED = 500
_MOST_TENSORS = 8
_WIDTH = 400  # cells of a source line
_CODE = re.compile(r"`([^`]+)`")


def page_of(run: Run, *, advice: Sequence[str] = (), with_source: bool = True) -> str:
    """The run as one HTML file that needs nothing else.

    `advice` is what is recommended. Without source the page has no line of code and no path.
    """
    incidents, info = run.incidents, run.info
    folder = Path(info.script).parent if info.script and with_source else None
    if not with_source:
        incidents = [without_source(incident) for incident in incidents]
        info = info_without_source(info)
    sections = [
        Section(
            anchor=f"sf-{first.step}-{max(first.rank, 0)}",
            view=view_of(first, folder=folder, width=_WIDTH),
            checks=[*_checks(first), *_afterwards(run.series, first.step)],
            also_at=also,
            timeline=timeline(
                run.series,
                around(first.step, steps=run.steps),
                incidents=incidents,
                forecasts=run.forecasts,
            ),
            forecasts=run.forecasts,
        )
        for first, also in groups_of(incidents)[:_MOST_SHOWN]
    ]
    anchors = {
        step: section.anchor
        for section in reversed(sections)
        for step in (section.view.incident.step, *section.also_at)
    }
    done = [incident.outcome.strategy for incident in incidents if incident.outcome]
    page = _environment().get_template("page.html")
    return page.render(
        run=run,
        info=info,
        name=Path(info.script).name or "Training run",
        summary=summary_of(run),
        verdict=_verdict(run),
        incidents=incidents[:_MOST_LISTED],
        left=max(len(incidents) - _MOST_LISTED, 0),
        sections=sections,
        anchors=anchors,
        timeline=_whole_timeline(run, len(sections)),
        heat=heat_map(run.series),
        recovered={strategy: done.count(strategy) for strategy in dict.fromkeys(done)},
        advice=advice,
        facts=_facts(info, run.path if with_source else None),
        with_source=with_source,
    )


def incidents_fragment(
    incidents: Sequence[Incident], *, steps: int, folder: Path | None = None
) -> str:
    """The incidents as a piece of HTML for a notebook, with its style."""
    sections = [
        Section(
            anchor=f"sf-{first.step}",
            view=view_of(first, folder=folder, width=_WIDTH),
            checks=list(_checks(first)),
            also_at=also,
        )
        for first, also in groups_of(incidents)[:_MOST_SHOWN]
    ]
    template = _environment().get_template("fragment.html")
    return template.render(sections=sections, verdict=verdict_of(len(incidents), steps))


@dataclass(frozen=True, kw_only=True)
class PageVerdict:
    """How the run went, in a line; `mood` is a colour."""

    mood: str
    text: str
    more: str = ""


_ENDS = {
    "running": ("busy", "The run is still being recorded."),
    "killed": ("bad", "The run ended without reporting: killed."),
    "script-error": ("bad", "The script ended with an error of its own."),
}


def _verdict(run: Run) -> PageVerdict:
    """From how it ended, and what happened before."""
    said = verdict_of(len(run.incidents), run.steps)
    if run.exit not in _ENDS:
        return said
    mood, more = _ENDS[run.exit]
    return PageVerdict(mood="bad" if run.incidents else mood, text=said.text, more=more)


def verdict_of(incidents: int, steps: int) -> PageVerdict:
    """What happened in so many steps."""
    taken = "1 step" if steps == 1 else f"{steps:,} steps"
    if incidents:
        return PageVerdict(mood="bad", text=f"{wording.count(incidents, 'incident')} in {taken}")
    if not steps:
        return PageVerdict(mood="busy", text="No training step was seen")
    return PageVerdict(mood="good", text=f"{taken}, all finite" if steps > 1 else "1 step, finite")


def groups_of(incidents: Sequence[Incident]) -> list[tuple[Incident, list[int]]]:
    """Incidents that are told in the same words: the first, and the steps of the others."""
    found: dict[Any, tuple[Incident, list[int]]] = {}
    for incident in incidents:
        origin, diagnosis = incident.origin, incident.diagnosis
        place = origin and (origin.phase, origin.op, origin.module)
        key = incident.fingerprint, place, diagnosis and diagnosis.why
        if key in found:
            found[key][1].append(incident.step)
        else:
            found[key] = incident, []
    return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Section:
    """One incident on the page, and what surrounds it."""

    anchor: str
    view: IncidentView
    checks: list[str]
    also_at: list[int]
    timeline: Sequence[Plot] = ()
    forecasts: Sequence[Forecast] = ()


def _checks(incident: Incident) -> Iterator[str]:
    origin, diagnosis = incident.origin, incident.diagnosis
    if origin is not None and origin.exact:
        yield "The operation was seen at work, with the inputs that are shown here."
    said = [wording.INFERRED] if origin is not None and not origin.exact else []
    for text in (*said, *(diagnosis.evidence if diagnosis else ())):
        yield text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
    if diagnosis is not None and diagnosis.confidence != "proven":
        yield (
            "The cause follows from the operation and its inputs; no replay has proven it. "
            "Apply the fix, run again, and put the two runs side by side: "
            "`stayfinite compare BEFORE AFTER`."
        )


def _afterwards(series: Series, step: int) -> Iterator[str]:
    """How training went on after this step; nothing where it did not."""
    columns = zip(series["step"], series["loss"], strict=True)
    losses = [loss for at, loss in columns if at > step and loss is not None]
    if losses:
        bad = sum(not math.isfinite(loss) for loss in losses)
        how = f"of which {bad} not finite" if bad else f"all finite, the last {short(losses[-1])}"
        yield f"Training went on: {wording.count(len(losses), 'more loss')}, {how}."


def _whole_timeline(run: Run, sections: int) -> list[Plot]:
    """The whole run, unless the one close-up shows all of it."""
    steps = [incident.step for incident in run.incidents]
    # What is expected after the end is in view, but takes no more than a fifth of it.
    ends = [each.step + (each.steps_high or each.steps_left or 0) for each in run.forecasts]
    after = min(max(ends, default=0), run.steps * 5 // 4)
    whole = Window(first=0, last=max([run.steps - 1, 0, after, *steps]))
    if sections == 1 and around(steps[0], steps=run.steps) == whole:
        return []
    return timeline(run.series, whole, incidents=run.incidents, forecasts=run.forecasts)


def _facts(info: RunInfo, path: Path | None) -> dict[str, str]:
    """What the run was made with; what is not known is left out."""
    dirty = " with changes that are not committed" if info.is_dirty else ""
    facts = {
        "script": info.script,
        "command": " ".join(info.command),
        "folder": info.cwd,
        "record": "" if path is None else str(path),
        "machine": info.host,
        "platform": info.platform,
        "ranks": str(info.world) if info.world > 1 else "",
        "seed": "" if info.seed is None else str(info.seed),
        "git commit": f"{info.commit}{dirty}" if info.commit else "",
        "Python": info.python,
        **info.versions,
        **{f"option {key}": str(value) for key, value in info.config.items() if value is not None},
    }
    return {key: value for key, value in facts.items() if value}


def _with_code(text: str) -> Markup:
    """The text, with `this` as code."""
    pieces = enumerate(_CODE.split(visible_text(text)))
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if at % 2 else escape(piece) for at, piece in pieces
    )


def _cause_title(cause: str) -> str:
    return CAUSES[cause].title if cause in CAUSES else cause.replace("_", " ").capitalize()


def _patch_kind(line: str) -> str:
    if line.startswith(("+++ ", "--- ", "@@")):
        return "place"
    return {"+": "new", "-": "old"}.get(line[0], "same")


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=visible_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "with_code": _with_code,
        "count": wording.count,
        "short": short,
        "cause_title": _cause_title,
        "histogram": histogram,
        "lineage": lineage,
        "doublings_left": doublings_left,
        "dedent": dedent,
        "patch_kind": _patch_kind,
    }
    made.globals |= {"wording": wording, "most_tensors": _MOST_TENSORS}
    return made
