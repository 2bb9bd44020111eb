"""The page of a run, and the incidents of a guard as a piece of one."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from stayfinite import text as wording
from stayfinite.records import Diagnosis, Incident, TensorSummary
from stayfinite.report.excerpt import CodeLine, code_lines
from stayfinite.report.html.charts import (
    Plot,
    Window,
    around,
    doublings_left,
    heat_map,
    histogram,
    short,
    timeline,
)
from stayfinite.report.html.lineage import Lineage, lineage
from stayfinite.report.html.markup import Causes, shown, title_of, with_code
from stayfinite.report.html.notebook import info_without_source, without_source
from stayfinite.report.run_summary import summary_of
from stayfinite.report.store.reading import Run, Series
from stayfinite.report.store.writer import RunInfo
from stayfinite.text import FULL, remark

TEMPLATES = Path(__file__).with_name("templates")
_MOST_SHOWN = 20  # incidents in full; the list has them all
_MOST_LISTED = 500


def page_of(
    run: Run, *, causes: Causes, advice: Sequence[str] = (), with_source: bool = True
) -> str:
    """The run as one HTML file that needs nothing else.

    `causes` has the general words for each cause, `advice` what is recommended. Without source
    the page has no line of code and no path.
    """
    incidents = run.incidents
    info = run.info
    folder = Path(info.script).parent if info.script and with_source else None
    if not with_source:
        incidents = [without_source(incident, causes) for incident in incidents]
        info = info_without_source(info)
    views = _views(run, incidents, causes=causes, folder=folder, with_source=with_source)
    return (
        _environment()
        .get_template("page.html")
        .render(
            run=run,
            info=info,
            name=Path(info.script).name or "Training run",
            summary=summary_of(run),
            verdict=verdict(run),
            incidents=incidents[:_MOST_LISTED],
            left=max(len(incidents) - _MOST_LISTED, 0),
            views=views,
            anchors=_anchors(views),
            timeline=_whole(run, views),
            heat=heat_map(run.series),
            recovered=_recovered(incidents),
            advice=advice,
            facts=_facts(info, run.path if with_source else None),
            titles={cause: title_of(cause, causes) for cause in _causes(incidents)},
            with_source=with_source,
        )
    )


def incidents_fragment(
    incidents: Sequence[Incident], *, steps: int, causes: Causes, folder: Path | None = None
) -> str:
    """The incidents as a piece of HTML for a notebook, with its style."""
    views = [
        incident_view(
            first,
            anchor=f"sf-{first.step}",
            causes=causes,
            folder=folder,
            timeline=[],
            also_at=also,
        )
        for first, also in alike(incidents)[:_MOST_SHOWN]
    ]
    template = _environment().get_template("fragment.html")
    return template.render(views=views, verdict=counted(len(incidents), steps))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How the run went, in a line; `mood` is a colour."""

    mood: str
    text: str
    more: str = ""


def verdict(run: Run) -> Verdict:
    """From how it ended, and what happened before."""
    steps, number = run.steps, len(run.incidents)
    said = counted(number, steps)
    ends = {
        "running": Verdict(mood="busy", text=said.text, more="The run is still being recorded."),
        "killed": Verdict(mood="bad", text=said.text, more="The run ended without a word: killed."),
        "script-error": Verdict(
            mood="bad", text=said.text, more="The script ended with an error of its own."
        ),
    }
    if run.exit in ends:
        end = ends[run.exit]
        return Verdict(mood="bad" if number else end.mood, text=end.text, more=end.more)
    return said


def counted(incidents: int, steps: int) -> Verdict:
    """What happened in so many steps."""
    taken = "1 step" if steps == 1 else f"{steps:,} steps"
    if incidents:
        return Verdict(mood="bad", text=f"{wording.count(incidents, 'incident')} in {taken}")
    if not steps:
        return Verdict(mood="busy", text="No training step was seen")
    return Verdict(mood="good", text=f"{taken}, all finite" if steps > 1 else "1 step, finite")


def _views(
    run: Run, incidents: list[Incident], *, causes: Causes, folder: Path | None, with_source: bool
) -> list[IncidentView]:
    series, views = run.series, []
    for first, also in alike(incidents)[:_MOST_SHOWN]:
        window = around(first.step, steps=run.steps)
        view = incident_view(
            first,
            anchor=f"sf-{first.step}-{max(first.rank, 0)}",
            causes=causes,
            folder=folder,
            timeline=timeline(series, window, incidents=incidents),
            afterwards=afterwards(series, first.step),
            also_at=also,
            source_left_out=not with_source,
        )
        views.append(view)
    return views


def alike(incidents: Sequence[Incident]) -> list[tuple[Incident, list[int]]]:
    """Incidents of one place and cause together: the first, and the steps of the others."""
    found: dict[Any, tuple[Incident, list[int]]] = {}
    for incident in incidents:
        origin, diagnosis = incident.origin, incident.diagnosis
        place = origin and (origin.phase, origin.op, origin.file, origin.line, origin.module)
        key = place, diagnosis and diagnosis.cause, diagnosis and diagnosis.why
        if key in found:
            found[key][1].append(incident.step)
        else:
            found[key] = incident, []
    return list(found.values())


def _anchors(views: list[IncidentView]) -> dict[int, str]:
    """The section that tells of a step."""
    return {
        step: view.anchor
        for view in reversed(views)
        for step in (view.incident.step, *view.also_at)
    }


def afterwards(series: Series, step: int) -> str:
    """How training went on after this step; empty where it did not."""
    losses = [
        loss
        for at, loss in zip(series["step"], series["loss"], strict=True)
        if at > step and loss is not None
    ]
    if not losses:
        return ""
    bad = sum(not math.isfinite(loss) for loss in losses)
    later = wording.count(len(losses), "more loss").replace("losss", "losses")
    if bad:
        return f"Training went on: {later}, of which {bad} not finite."
    return f"Training went on: {later}, all finite, the last {short(losses[-1])}."


def _whole(run: Run, views: list[IncidentView]) -> list[Any]:
    """The whole run, unless the one close-up shows all of it."""
    steps = [incident.step for incident in run.incidents]
    whole = Window(first=0, last=max([run.steps - 1, 0, *steps]))
    if len(views) == 1 and around(steps[0], steps=run.steps) == whole:
        return []
    return timeline(run.series, whole, incidents=run.incidents)


def _causes(incidents: Sequence[Incident]) -> set[str]:
    return {incident.diagnosis.cause for incident in incidents if incident.diagnosis}


def _recovered(incidents: Sequence[Incident]) -> dict[str, int]:
    """How often each strategy was used."""
    done = [incident.outcome.strategy for incident in incidents if incident.outcome]
    return {strategy: done.count(strategy) for strategy in dict.fromkeys(done)}


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


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"with_code": with_code, "count": wording.count, "short": short}
    made.globals |= {"wording": wording}
    return made


_MOST_TENSORS = 8


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """One tensor: its numbers, and its values by size."""

    role: str
    name: str
    remark: str
    facts: dict[str, str]
    plot: Plot | None
    is_bad: bool


@dataclass(frozen=True, kw_only=True)
class PatchLine:
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class IncidentView:
    """The five parts of an incident, its lineage and what surrounds it."""

    anchor: str
    incident: Incident
    headline: str
    title: str
    spot: str
    code: list[CodeLine]
    birth: str
    names: str
    tensors: list[TensorView]
    more_tensors: int
    patch: list[PatchLine]
    checks: list[str]
    lineage: Lineage | None
    timeline: list[Plot]
    also_at: list[int]
    source_left_out: bool


def incident_view(
    incident: Incident,
    *,
    anchor: str,
    causes: Causes,
    folder: Path | None,
    timeline: list[Plot],
    afterwards: str = "",
    also_at: Sequence[int] = (),
    source_left_out: bool = False,
) -> IncidentView:
    """`afterwards` says how training went on."""
    origin, diagnosis = incident.origin, incident.diagnosis
    tensors = list(_tensors(incident))
    return IncidentView(
        anchor=anchor,
        incident=incident,
        headline=wording.headline(incident),
        title=title_of(diagnosis.cause, causes) if diagnosis else "Not explained",
        spot=_spot(incident, source_left_out),
        code=code_lines(origin, folder=folder),
        birth=wording.birth(incident, origin) if origin else "",
        names=wording.full_op(origin) if origin else "",
        tensors=tensors[:_MOST_TENSORS],
        more_tensors=max(len(tensors) - _MOST_TENSORS, 0),
        patch=_patch(diagnosis),
        checks=list(filter(None, (*_checks(incident), afterwards))),
        lineage=lineage(incident),
        timeline=timeline,
        also_at=list(also_at),
        source_left_out=source_left_out,
    )


def _spot(incident: Incident, source_left_out: bool) -> str:
    spot = wording.spot(incident.origin)
    return spot.replace("(no source line)", "(source left out)") if source_left_out else spot


def _tensors(incident: Incident) -> Iterator[TensorView]:
    origin = incident.origin
    if origin is None:
        return
    yield from (_tensor("input", each) for each in origin.inputs)
    yield from (_tensor("output", each) for each in origin.outputs)


def _tensor(role: str, tensor: TensorSummary) -> TensorView:
    return TensorView(
        role=role,
        name=wording.plain(tensor.name),
        remark=remark(tensor),
        facts={
            **{name: column(tensor) for name, column in FULL.items()},
            "doublings left": doublings_left(tensor),
        },
        plot=histogram(tensor),
        is_bad=bool(tensor.bad_count),
    )


def _patch(diagnosis: Diagnosis | None) -> list[PatchLine]:
    lines = (diagnosis.patch or "").rstrip("\n").split("\n") if diagnosis else []
    return [PatchLine(kind=_patch_kind(line), text=line) for line in lines if line]


def _patch_kind(line: str) -> str:
    if line.startswith(("+++ ", "--- ", "@@")):
        return "place"
    return {"+": "new", "-": "old"}.get(line[0], "same")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")


def _checks(incident: Incident) -> Iterator[str]:
    origin, diagnosis = incident.origin, incident.diagnosis
    if origin is not None:
        seen = "The operation was seen at work, with the inputs that are shown here."
        yield seen if origin.exact else _sentence(wording.INFERRED)
    yield from map(_sentence, diagnosis.evidence if diagnosis else ())
    if diagnosis is not None and diagnosis.confidence != "proven":
        yield (
            "The cause follows from the operation and its inputs; no replay has proven it. "
            "Apply the fix, run again, and put the two runs side by side: "
            "`stayfinite compare BEFORE AFTER`."
        )
