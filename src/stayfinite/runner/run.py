"""`stayfinite run`: the script, watched from its first line to its last exit handler.

At the end of a run there is one result of all processes.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from stayfinite.errors import ConfigError, SandboxError
from stayfinite.records import Exit, Incident, RunResult, to_json
from stayfinite.report.store.writer import RESULT
from stayfinite.runner import sandbox
from stayfinite.runner.capsules import ORDER, run_ordered, wish_of
from stayfinite.runner.options import RunOptions, Scene, guard_data
from stayfinite.runner.plan import (
    MAIN,
    VARIABLE,
    Plan,
    ProcessRecord,
    first_incident,
    load_records,
    merged_result,
    read_plan,
    write_atomically,
)
from stayfinite.runner.processes import (
    deaths,
    exit_code,
    is_launched_rank,
    launched_ranks,
    leave_ranks,
    rank_key,
    records_of_ranks,
    shared_folder,
    speaks_for_ranks,
    tell_once,
    watch_children,
)
from stayfinite.runner.script import (
    INCIDENT_CODE,
    Ending,
    Target,
    ending_of,
    execute,
    flush,
    leave,
    problem,
    watch_sudden_exit,
    watch_threads,
)
from stayfinite.runner.second_run import UNHELD, UNHELD_CODE
from stayfinite.runner.verdict import judge, last_line
from stayfinite.runner.watcher import Watch, is_consequence, rank, run_folder, watch_for
from stayfinite.safely import beside_bars, say, step_aside
from stayfinite.text import one_line

_running: list[Scene] = []


def run(target: Target, *, options: RunOptions) -> None:
    """Run the target under watch and leave the process with the exit code that is due.

    Raises ConfigError, before anything has run, for a target or a file that cannot be used.
    """
    if (reason := problem(target)) is not None:
        raise ConfigError(reason)
    if _running:
        say("this script is already being watched; the inner `run` adds nothing.")
        execute(target)
        return
    scene = _scene(target, options)
    _running.append(scene)
    watch = Watch(scene.plan, key=rank_key(os.environ) if scene.is_rank else MAIN)
    watch.listeners.append(lambda w, i: _heard(scene, i))
    watch_and_leave(watch, target, finish=lambda ending: close(scene, watch, ending))


def watch_and_leave(watch: Watch, target: Target, *, finish: Callable[[Ending], int]) -> None:
    """Run the target under the watch; `finish` gives the exit code of the process it began in."""
    home = os.getpid()

    def finish_here(ending: Ending) -> int:
        if os.getpid() == home:
            return finish(ending)
        return exit_code(watch, ending)

    watch.start()
    watch_children(watch)
    watch_threads()
    watch_sudden_exit(finish_here)
    ending = ending_of(
        lambda: execute(target),
        is_consequence=lambda error: is_consequence(error, watch),
        crashed=watch.crashed,
    )
    leave(ending, finish_here(ending))


def _scene(target: Target, options: RunOptions) -> Scene:
    is_rank = is_launched_rank()
    if options.json is not None and (rank() == 0 or not is_rank):
        _check_writable(options.json)
    try:
        folder = shared_folder() if is_rank else tempfile.mkdtemp(prefix="stayfinite-")
    except OSError as error:
        raise ConfigError(
            f"no temporary folder can be made ({error}); set TMPDIR to one that can be written."
        ) from error
    started = time.time()
    plan = Plan(
        folder=folder,
        guard=guard_data(options, target),
        started=started,
        ends_peers=not is_rank,
        run_dir=run_folder(options, target, started=started, meet=folder if is_rank else None),
        command=tuple(target.command),
        capsule=wish_of(options, os.getcwd(), ranks=launched_ranks() if is_rank else None),
    )
    plan.save()
    return Scene(target=target, options=options, plan=plan, is_rank=is_rank)


def _check_writable(path: str) -> None:
    # Stands until the run has ended properly: a process that is killed is a script error.
    begun = to_json(RunResult(exit="script-error"), indent=1)
    try:
        write_atomically(path, begun)
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be written: {error.strerror}.") from error


def _heard(scene: Scene, incident: Incident) -> None:
    if os.getpid() != scene.plan.pid:
        return  # a forked child, which tells by itself
    tell_at_once(scene, incident)
    if scene.options.json is not None and not scene.is_rank:
        records = load_records(scene.plan.folder)
        so_far = merged_result(records, only_first=scene.plan.stops)
        so_far = dataclasses.replace(so_far, exit="incident")
        write_atomically(scene.options.json, to_json(so_far, indent=1))


_MOST_SHOWN = 3


def close(scene: Scene, watch: Watch, ending: Ending) -> int:
    """Say and save what was found; the result is the exit code of the run."""
    code = exit_code(watch, ending)
    with step_aside("the report"):
        flush()
        records = load_records(scene.plan.folder)
        if scene.is_rank:
            records = records_of_ranks(scene.plan.folder)
        result = merged_result(records, only_first=scene.plan.stops)
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
        if not scene.is_rank or speaks_for_ranks(records, watch):
            result = verdict.of(dataclasses.replace(result, exit=_exit_of(result, ending)))
            result = _conclude(scene, records, result)
            ended = dataclasses.replace(ending, code=code)
            for remark in result.remarks if result.incidents else ():
                say(remark)
            say(last_line(records, result, verdict, ended, scene.options.on_nan))
    leave_ranks(watch) if scene.is_rank else shutil.rmtree(scene.plan.folder, ignore_errors=True)
    return code


def tell_at_once(scene: Scene, incident: Incident) -> None:
    """One line while the script goes on; in stop mode the report follows soon enough."""
    if not scene.plan.stops:
        say(f"{one_line(incident)}; {scene.plan.what_follows(incident)}.")


def _conclude(scene: Scene, records: list[ProcessRecord], result: RunResult) -> RunResult:
    _write(scene, result)
    notes: list[str] = []
    if result.incidents:
        # Late: a run that stays finite should not wait for the rules and changes that they import.
        from stayfinite.runner.capsules import deliver
        from stayfinite.runner.prove import Budget, experiment, try_changes
        from stayfinite.runner.second_run import look_again

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
        before = first.get(incident.fingerprint)
        is_better = before is not None and not _is_seen(before) and _is_seen(incident)
        if before is None or is_better:
            first[incident.fingerprint] = incident
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


def _folder(scene: Scene, records: list[ProcessRecord]) -> Path:
    found = first_incident(records)
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


def main(*, key: str) -> None:
    """Run the target on the command line under the plan that the environment names."""
    sys.path.pop(0)  # the entry that the starting command added to find us
    target = _target(sys.argv[1:])
    plan = read_plan(os.environ.pop(VARIABLE)).with_guard(folder=target.folder)
    if key == MAIN:
        plan = dataclasses.replace(plan, pid=os.getpid(), sandbox=_held(plan, target))
        plan.save()
    if (capsule := os.environ.pop(ORDER, None)) is not None:
        run_ordered(capsule, plan, target)
        return
    watch = watch_for(plan, key=key)
    if key != MAIN:
        watch.listeners.append(tell_once)

    def finish(ending: Ending) -> int:
        code = exit_code(watch, ending)
        stopped = any(record.stopped for record in load_records(plan.folder))
        return INCIDENT_CODE if stopped else code

    watch_and_leave(watch, target, finish=finish)


def _held(plan: Plan, target: Target) -> str | None:
    """Enter a sandbox if this run is not the user's own; leave without a run if there is none."""
    if not plan.sandboxes:
        return None
    try:
        return sandbox.enter(
            plan.folder,
            kinds=[kind for kind in sandbox.KINDS if kind in plan.sandboxes],
            writable=plan.writable,
            near=(target.folder,),
            hidden=plan.hidden,
        )
    except SandboxError as error:
        write_atomically(os.path.join(plan.folder, UNHELD), str(error))
        sys.exit(UNHELD_CODE)


def _target(words: list[str]) -> Target:
    is_module = words[0] == "-m"
    name, *args = words[1:] if is_module else words
    return Target(name=name, args=tuple(args), is_module=is_module)
