"""`stayfinite run`: the script, watched from its first line to its last exit handler."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable

from stayfinite.errors import ConfigError
from stayfinite.records import Incident, RunResult, to_json
from stayfinite.runner import ranks, tree
from stayfinite.runner.capsules import wish_of
from stayfinite.runner.children import exit_code, watch_children
from stayfinite.runner.closing import close, tell_at_once
from stayfinite.runner.ending import (
    Ending,
    ending_of,
    leave,
    watch_sudden_exit,
    watch_threads,
)
from stayfinite.runner.options import RunOptions
from stayfinite.runner.peers import is_consequence
from stayfinite.runner.plan import MAIN, Plan, write_atomically
from stayfinite.runner.recording import run_folder
from stayfinite.runner.scene import Scene, guard_data
from stayfinite.runner.script import Target, execute, problem
from stayfinite.runner.torchrun import rank_key
from stayfinite.runner.watch import Watch, rank
from stayfinite.runner.words import say

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
    is_rank = ranks.is_rank()
    if options.json is not None and (rank() == 0 or not is_rank):
        _check_writable(options.json)
    try:
        folder = ranks.shared_folder() if is_rank else tempfile.mkdtemp(prefix="stayfinite-")
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
        capsule=wish_of(options, os.getcwd(), ranks=ranks.size() if is_rank else None),
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
        records = tree.load(scene.plan.folder)
        so_far = tree.merged(records, only_first=scene.plan.stops)
        so_far = dataclasses.replace(so_far, exit="incident")
        write_atomically(scene.options.json, to_json(so_far, indent=1))
