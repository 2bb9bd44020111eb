"""The watch over one process of a preflight: it records the first steps, then ends the script."""

from __future__ import annotations

import json
import os
import threading
from types import ModuleType
from typing import TYPE_CHECKING

from stayfinite.errors import TrainingAbortedError
from stayfinite.prevent.risks import Risk
from stayfinite.records import RunResult, from_data, to_data
from stayfinite.runner.aside import step_aside
from stayfinite.runner.audit import Effect
from stayfinite.runner.ending import watch_unraisable
from stayfinite.runner.imports import after_import
from stayfinite.runner.peers import end_peers_soon
from stayfinite.runner.plan import Plan, write_atomically
from stayfinite.runner.watch import Watch

if TYPE_CHECKING:
    from stayfinite.prevent.preflight.script import ScriptRehearsal

_NO_ERROR = "preflight has seen the first step; this is not an error."


class RehearsalWatch(Watch):
    """Ends the script when it is about to make its second update, and leaves its risks on disk.

    Where it cannot have copies of the files that it changes, it is ended before the first change.
    """

    def __init__(self, plan: Plan, *, key: str) -> None:
        super().__init__(plan, key=key)
        self._script: ScriptRehearsal | None = None
        self._is_over = self._has_written = False
        self._thread = threading.get_ident()

    def start(self) -> None:
        """Attach to this process, and to torch as soon as the script imports it."""
        self._audit()
        watch_unraisable()
        after_import("torch", self._attach)

    @property
    def has_stopped(self) -> bool:
        return self._is_over

    def end(self) -> None:
        """Judge what was recorded, if the script ended before its second update."""
        with step_aside("judging the first steps"):
            self._write()
        super().end()

    def mute(self) -> None:
        self.is_muted = True
        if self._script is not None:
            self._script.detach()

    def _result(self) -> RunResult:
        return RunResult()

    def _attach(self, torch: ModuleType) -> None:
        from stayfinite.prevent.preflight.script import ScriptRehearsal

        if not self.is_muted:
            folder = self.plan.guard.get("folder")
            self._script = ScriptRehearsal(folder=folder, enough=self._enough)
            self._script.attach()
            self._thread = threading.get_ident()

    def _was_refused(self, effect: Effect) -> None:
        super()._was_refused(effect)
        if self.is_muted or self._has_ended or self._script is None:
            return
        is_enough = self._is_over or self._script.has_trained
        if is_enough and threading.get_ident() == self._thread:  # else it cannot be ended here
            self._enough()

    def _enough(self) -> None:
        self._is_over = True
        with step_aside("judging the first steps"):
            self._write()
        with step_aside("noting the end"):
            self.save()
            end_peers_soon(self)
        raise TrainingAbortedError(_NO_ERROR)

    def _write(self) -> None:
        script = self._script
        if script is None or self._has_written or self.is_muted:
            return
        self._has_written = True
        script.detach()
        found = {"steps": script.steps, "risks": to_data(script.risks())}
        if os.path.isdir(self.plan.folder):
            path = os.path.join(self.plan.folder, f"risks-{os.getpid()}.json")
            write_atomically(path, json.dumps(found, allow_nan=False))


def found_in(folder: str) -> tuple[int, list[Risk]]:
    """Steps and risks of all processes that have written there."""
    steps, risks = 0, []
    for name in sorted(os.listdir(folder)):
        if name.startswith("risks-"):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                data = json.load(file)
            steps = max(steps, int(data["steps"]))
            risks += [from_data(Risk, entry) for entry in data["risks"]]
    return steps, risks
