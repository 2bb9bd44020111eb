"""The watch over a process that experiments are made in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stayfinite.records import Incident, from_data
from stayfinite.runner.plan import Plan
from stayfinite.runner.watch import Watch

if TYPE_CHECKING:
    from types import ModuleType

    from stayfinite.guard import Guard
    from stayfinite.guard.lab.bench import Bench


_leave = os._exit  # as it is before a watch makes it tell of the end


class LabWatch(Watch):
    """Runs the script to its bad step; from there children of it go on, and tell what they see."""

    _bench: Bench | None = None

    def __init__(self, plan: Plan, *, key: str) -> None:
        super().__init__(plan, key=key)
        assert plan.lab is not None
        self._lab = plan.lab

    def crashed(self, error: BaseException) -> None:
        """The script died of an error of its own."""
        if self._bench is not None and self._bench.is_child:
            self._bench.crashed(error)

    def end(self) -> None:
        """The script is over; in a child that means that it stayed finite."""
        if self._bench is not None and self._bench.is_child:
            self._bench.answer(None)
        super().end()

    def after_fork(self) -> None:
        """A child of ours is still the same script; one of the script's own is not."""
        if self._bench is None or not self._bench.is_forking:
            super().after_fork()

    def _attach(self, torch: ModuleType) -> None:
        super()._attach(torch)
        if self._bench is not None and self.guard is not None:
            self._bench.attach(self.guard)

    def _new_guard(self) -> Guard:
        from stayfinite.guard.lab.bench import Bench, LabGuard
        from stayfinite.settings import GuardSettings

        self._bench = Bench(
            from_data(Incident, self._lab["incident"]),
            folder=self.plan.folder,
            result=self._lab["result"],
            deadline=self.plan.started + float(self._lab["seconds"]),
            leave=_leave,
        )
        guard = LabGuard(from_data(GuardSettings, self.plan.guard), on_incident=self._heard)
        guard.bench = self._bench
        return guard

    def _heard(self, incident: Incident) -> None:
        if self._bench is not None and self._bench.is_child:
            self._bench.answer(incident)
