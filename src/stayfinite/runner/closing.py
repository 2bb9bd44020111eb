"""The end of a run: one result of all processes, said on stderr and written as JSON."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
from pathlib import Path

from stayfinite.records import Exit, Incident, RunResult, to_json
from stayfinite.report.sinks import beside_bars
from stayfinite.report.store.schema import RESULT
from stayfinite.runner import ranks, tree
from stayfinite.runner.aside import step_aside
from stayfinite.runner.children import deaths, exit_code
from stayfinite.runner.ending import INCIDENT_CODE, Ending, flush
from stayfinite.runner.plan import write_atomically
from stayfinite.runner.scene import Scene
from stayfinite.runner.verdict import judge, last_line
from stayfinite.runner.watch import Watch
from stayfinite.runner.words import one_line, say

_MOST_SHOWN = 3


def close(scene: Scene, watch: Watch, ending: Ending) -> int:
    """Say and save what was found; the result is the exit code of the run."""
    code = exit_code(watch, ending)
    with step_aside("the report"):
        flush()
        records = tree.load(scene.plan.folder)
        if scene.is_rank:
            records = ranks.heard_out(scene.plan.folder)
        result = tree.merged(records, only_first=scene.plan.stops)
        verdict = judge(
            records,
            result,
            recovers=scene.options.on_nan == "recover",
            deaths=deaths(),
            speaker=watch.pid,
            is_last=not scene.is_rank,
        )
        failed = verdict.failure is not None and not code
        if failed or any(record.stopped for record in records):
            code = INCIDENT_CODE
        if not scene.is_rank or ranks.speaks(records, watch):
            result = verdict.of(dataclasses.replace(result, exit=_exit_of(result, ending)))
            result = _conclude(scene, records, result)
            ended = dataclasses.replace(ending, code=code)
            for remark in result.remarks if result.incidents else ():
                say(remark)
            say(last_line(records, result, verdict, ended, scene.options.on_nan))
    ranks.leave(watch) if scene.is_rank else shutil.rmtree(scene.plan.folder, ignore_errors=True)
    return code


def tell_at_once(scene: Scene, incident: Incident) -> None:
    """One line while the script goes on; in stop mode the report follows soon enough."""
    if not scene.plan.stops:
        say(f"{one_line(incident)}; {scene.plan.what_follows(incident)}.")


def _conclude(scene: Scene, records: list[tree.ProcessRecord], result: RunResult) -> RunResult:
    _write(scene, result)
    notes: list[str] = []
    if result.incidents:
        # Late: a run that stays finite should not wait for the rules and changes that they import.
        from stayfinite.runner.budget import Budget
        from stayfinite.runner.capsules import deliver
        from stayfinite.runner.experiments import experiment
        from stayfinite.runner.second import look_again
        from stayfinite.runner.trials import try_changes

        result, notes = look_again(scene, records, result)
        _write(scene, result)
        budget = Budget(scene.options.prove)
        result, more = try_changes(scene, records, result, budget)
        notes += more
        _write(scene, result)
        result = experiment(scene, records, result, budget)
        _write(scene, result)
        notes += deliver(scene, records, result)
    folder = _folder(scene, records)
    for incident in _shown_in_full(scene, result.incidents):
        _show(incident, folder=folder, verbose=scene.options.verbose)
    for note in notes:
        say(note)
    if result.incidents and (run_dir := _recorded_in(scene)) is not None:
        name = shlex.quote(os.path.relpath(run_dir, scene.cwd))
        say(f"recorded in {name}; to see it as a page: stayfinite html {name}")
        if any(incident.diagnosis and incident.diagnosis.patch for incident in result.incidents):
            say(f"to make the change that was tried: stayfinite fix --write {name}")
    return result


def _recorded_in(scene: Scene) -> str | None:
    run_dir = scene.plan.run_dir
    return run_dir if run_dir is not None and os.path.isdir(run_dir) else None


def _shown_in_full(scene: Scene, incidents: tuple[Incident, ...]) -> list[Incident]:
    """All of them; of those that were recovered from, each cause and line once.

    That is the first one whose operation was seen, if one was.
    """
    if scene.options.on_nan != "recover":
        return list(incidents)
    first: dict[object, Incident] = {}
    for incident in incidents:
        origin, diagnosis = incident.origin, incident.diagnosis
        key = (diagnosis and diagnosis.cause, origin and origin.file, origin and origin.line)
        before = first.get(key)
        is_better = before is not None and not _is_seen(before) and _is_seen(incident)
        if before is None or is_better:
            first[key] = incident
    return list(first.values())[:_MOST_SHOWN]


def _is_seen(incident: Incident) -> bool:
    return incident.origin is not None and incident.origin.exact


def _write(scene: Scene, result: RunResult) -> None:
    paths = [] if scene.options.json is None else [scene.options.json]
    if (run_dir := _recorded_in(scene)) is not None:
        paths.append(os.path.join(run_dir, RESULT))
    for path in paths:
        try:
            write_atomically(path, to_json(result, indent=1) + "\n")
        except OSError as error:
            say(f"{path} cannot be written any more: {error.strerror}.")


def _folder(scene: Scene, records: list[tree.ProcessRecord]) -> Path:
    found = tree.first_incident(records)
    return Path((found and found[0].folder) or str(scene.plan.guard["folder"]))


def _show(incident: Incident, *, folder: Path, verbose: bool) -> None:
    try:
        from stayfinite.report.terminal import show

        with beside_bars():
            show(incident, verbose=verbose, folder=folder, file=sys.stderr)
    except Exception as error:
        say(one_line(incident))
        with step_aside("the full report"):
            raise error


def _exit_of(result: RunResult, ending: Ending) -> Exit:
    if result.incidents:
        return "incident"
    return "script-error" if ending.code else "finite"
