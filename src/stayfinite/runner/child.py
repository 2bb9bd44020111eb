"""A watched process that another one started by command line: a second run, or a rank."""

from __future__ import annotations

import dataclasses
import os
import sys

from stayfinite.errors import SandboxError
from stayfinite.runner import sandbox, tree
from stayfinite.runner.again import UNHELD, UNHELD_CODE
from stayfinite.runner.children import exit_code, tell_once
from stayfinite.runner.ending import INCIDENT_CODE, Ending
from stayfinite.runner.kinds import watch_for
from stayfinite.runner.plan import MAIN, VARIABLE, Plan, read_plan, write_atomically
from stayfinite.runner.replaying import ORDER, run_ordered
from stayfinite.runner.run import watch_and_leave
from stayfinite.runner.script import Target


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
        stopped = any(record.stopped for record in tree.load(plan.folder))
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
