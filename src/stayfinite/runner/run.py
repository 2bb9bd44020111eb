"""`stayfinite run`: the script, watched from its first line to its last exit handler.

At the end of a run there is one result of all processes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from stayfinite.budget import Budget
from stayfinite.errors import ConfigError, SandboxError
from stayfinite.records import Exit, Incident, RunResult, to_json
from stayfinite.report.sinks import Repeats, is_told
from stayfinite.report.sinks import rank_here as rank
from stayfinite.report.store.writer import RESULT, forget_run
from stayfinite.runner import processes, sandbox, script
from stayfinite.runner.capsules import ORDER, run_ordered, wish_of
from stayfinite.runner.case import UNHELD, UNHELD_CODE, Case, Stage, run_stages
from stayfinite.runner.options import RunOptions, Scene, first_settings
from stayfinite.runner.plan import (
    MAIN,
    VARIABLE,
    Plan,
    ProcessRecord,
    load_records,
    merged_result,
    read_plan,
    was_stopped,
    write_atomically,
)
from stayfinite.runner.processes import exit_code, tell_once, watch_children
from stayfinite.runner.script import INCIDENT_CODE, Ending, Target
from stayfinite.runner.verdict import judge, last_line
from stayfinite.runner.watcher import Watch, is_consequence, run_folder
from stayfinite.safely import beside_bars, say, step_aside
from stayfinite.text import one_line

_running: list[Scene] = []


def run(target: Target, *, options: RunOptions) -> None:
    """Run the target under watch and leave the process with the exit code that is due.

    Raises ConfigError, before anything has run, for a target or a file that cannot be used.
    """
    if (reason := script.problem(target)) is not None:
        raise ConfigError(reason)
    if _running:
        say("this script is already being watched; the inner `run` adds nothing.")
        script.execute(target)
        return
    scene = _scene(target, options)
    _running.append(scene)
    watch = Watch(scene.plan, key=processes.rank_key(os.environ) if scene.is_rank else MAIN)
    watch.listeners.append(lambda watch, incident: _tell(scene, incident))
    early: list[Incident] = []

    def show_early(incident: Incident) -> None:
        if os.getpid() == scene.plan.pid and not early:
            early.append(incident)
            _show(incident, folder=Path(scene.plan.script_folder), verbose=options.verbose)

    # Proofs may take long, so what is known is shown before them.
    if options.prove and scene.plan.stops and not scene.is_rank:
        watch.on_located = show_early
    watch_and_leave(watch, target, finish=lambda ending: close(scene, watch, ending, early))


def watch_and_leave(watch: Watch, target: Target, *, finish: Callable[[Ending], int]) -> None:
    """Run the target under the watch; `finish` gives the exit code of the process it began in."""
    home = os.getpid()

    def finish_here(ending: Ending) -> int:
        if os.getpid() == home:
            return finish(ending)
        return exit_code(watch, ending)

    watch.start()
    watch_children(watch)
    script.watch_threads()
    script.watch_sudden_exit(finish_here)
    ending = script.ending_of(
        lambda: script.execute(target),
        is_consequence=lambda error: is_consequence(error, watch),
        crashed=watch.crashed,
    )
    script.leave(ending, finish_here(ending))


def _scene(target: Target, options: RunOptions) -> Scene:
    is_rank = processes.is_launched_rank()
    if options.json is not None and (rank() == 0 or not is_rank):
        # Stands until the run has ended properly: a process that is killed is a script error.
        begun = to_json(RunResult(exit="script-error"), indent=1)
        try:
            write_atomically(options.json, begun)
        except OSError as error:
            reason = f"{options.json!r} cannot be written: {error.strerror}."
            raise ConfigError(reason) from error
    try:
        folder = processes.shared_folder() if is_rank else tempfile.mkdtemp(prefix="stayfinite-")
    except OSError as error:
        raise ConfigError(
            f"no temporary folder can be made ({error}); set TMPDIR to one that can be written."
        ) from error
    started = time.time()
    plan = Plan(
        folder=folder,
        guard=first_settings(options, target),
        started=started,
        ends_peers=not is_rank,
        run_dir=run_folder(options, target, started=started, meet=folder if is_rank else None),
        command=tuple(target.command),
        capsule=wish_of(
            options, os.getcwd(), ranks=processes.launched_ranks() if is_rank else None
        ),
    )
    plan.save()
    return Scene(target=target, options=options, plan=plan, is_rank=is_rank)


def _tell(scene: Scene, incident: Incident) -> None:
    """What is said and written at once, while the script goes on or unwinds."""
    plan, path = scene.plan, scene.options.json
    if os.getpid() != plan.pid:
        return  # a forked child, which tells by itself
    times = scene.repeats.note(incident)
    is_new = not plan.stops and is_told(times)  # else the report follows soon enough
    if is_new and scene.is_rank:  # what all ranks have in common is said once
        is_new = processes.is_first(os.path.join(plan.folder, f"told-{incident.step}"))
    if is_new:
        again = "" if times == 1 else f"; {times} times so far"
        say(f"{one_line(incident)}; {plan.what_follows(incident)}{again}.")
    if path is not None and not scene.is_rank:
        so_far = merged_result(load_records(plan.folder), only_first=plan.stops)
        write_atomically(path, to_json(dataclasses.replace(so_far, exit="incident"), indent=1))


_MOST_SHOWN = 3


def close(scene: Scene, watch: Watch, ending: Ending, early: list[Incident]) -> int:
    """Say and save what was found; the result is the exit code of the run.

    `early` are the incidents that were shown already.
    """
    code = exit_code(watch, ending)
    with step_aside("the report"):
        script.flush()
        records = (processes.records_of_ranks if scene.is_rank else load_records)(scene.plan.folder)
        result = merged_result(records, only_first=scene.plan.stops)
        verdict = judge(
            records,
            result,
            recovers=scene.options.on_nan == "recover",
            deaths=processes.deaths(),
            speaker=watch.pid,
            is_last=not scene.is_rank,
        )
        failed = verdict.failure is not None and not code
        if failed or was_stopped(records):
            code = INCIDENT_CODE
        if not scene.is_rank or processes.speaks_for_ranks(records, watch):
            exit: Exit = "script-error" if ending.code else "finite"
            exit = "incident" if result.incidents else exit
            result = verdict.of(dataclasses.replace(result, exit=exit))
            result = _conclude(scene, records, result, early)
            ended = dataclasses.replace(ending, code=code)
            for remark in result.remarks if result.incidents else ():
                say(remark)
            say(last_line(records, result, verdict, ended, scene.options.on_nan))
            if scene.is_rank:
                processes.have_spoken(watch)
            elif result.exit == "finite":
                _forget_short_run(scene)
        elif was_stopped(records):
            processes.wait_for_speaker(records, watch)
    if scene.is_rank:
        processes.leave_ranks(watch)
    else:
        shutil.rmtree(scene.plan.folder, ignore_errors=True)
    return code


def _conclude(
    scene: Scene, records: list[ProcessRecord], result: RunResult, early: list[Incident]
) -> RunResult:
    """`early` are the incidents that were shown before anything was proven of them."""
    stages: tuple[Stage, ...] = ()
    if result.incidents:
        # Late: a run that stays finite should not wait for the rules and changes that they import.
        from stayfinite.runner.capsules import deliver
        from stayfinite.runner.prove import try_changes
        from stayfinite.runner.second_run import look_again

        stages = (look_again, try_changes, deliver)
    budget = Budget(scene.options.prove)
    case = Case(scene=scene, records=records, result=result, budget=budget)
    case = run_stages(case, *stages, save=functools.partial(_write, scene))
    result = case.result
    for incident in _shown_in_full(scene, result.incidents):
        before = next((each for each in early if each.time == incident.time), None)
        if before is None:
            _show(incident, folder=Path(case.folder), verbose=scene.options.verbose)
        else:
            _show_proof(incident, before)
    for note in case.notes:
        say(note)
    if result.incidents and (run_dir := _recorded_in(scene)) is not None:
        name = shlex.quote(os.path.relpath(run_dir, scene.cwd))
        say(f"recorded in {name}; to view it as an HTML page: stayfinite html {name}")
        if any(incident.diagnosis and incident.diagnosis.patch for incident in result.incidents):
            say(f"to apply the tested change: stayfinite fix --write {name}")
    return result


_SHORT = 60.0  # seconds


def _forget_short_run(scene: Scene) -> None:
    """A healthy run that was short is not worth a record, unless one was asked for."""
    run_dir, is_asked = _recorded_in(scene), scene.options.run_dir is not None
    if run_dir is not None and not is_asked and time.time() - scene.plan.started < _SHORT:
        with step_aside("removing the record of a short run"):
            forget_run(run_dir)


def _recorded_in(scene: Scene) -> str | None:
    run_dir = scene.plan.run_dir
    return run_dir if run_dir is not None and os.path.isdir(run_dir) else None


def _shown_in_full(scene: Scene, incidents: tuple[Incident, ...]) -> list[Incident]:
    """Each cause and line once: the first one whose operation was seen, if one was."""
    first: dict[object, Incident] = {}
    repeats = Repeats()
    for incident in incidents:
        if repeats.note(incident) != 1 and incident.fingerprint not in first:
            continue  # it follows from the one before
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


def _show(incident: Incident, *, folder: Path, verbose: bool) -> None:
    try:
        from stayfinite.report.terminal import show

        with beside_bars():
            show(incident, verbose=verbose, folder=folder, file=sys.stderr)
    except Exception as error:
        say(one_line(incident))
        with step_aside("the full report"):
            raise error


def _show_proof(incident: Incident, before: Incident) -> None:
    with step_aside("the proof"), beside_bars():
        from stayfinite.report.terminal import show_proof

        show_proof(incident, before, file=sys.stderr)


def main(*, key: str) -> None:
    """Run the target on the command line under the plan that the environment names."""
    sys.path.pop(0)  # the entry that the starting command added to find us
    target = Target.of(sys.argv[1:])
    plan = read_plan(os.environ.pop(VARIABLE)).with_guard(folder=target.folder)
    if key == MAIN:
        plan = dataclasses.replace(plan, pid=os.getpid(), sandbox=_held(plan, target))
        plan.save()
    if (capsule := os.environ.pop(ORDER, None)) is not None:
        run_ordered(capsule, plan, target)
        return
    watch = Watch(plan, key=key)
    if key != MAIN:
        watch.listeners.append(tell_once)

    def finish(ending: Ending) -> int:
        code = exit_code(watch, ending)
        return INCIDENT_CODE if was_stopped(load_records(plan.folder)) else code

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
