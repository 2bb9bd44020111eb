"""Which watch a plan asks for."""

from __future__ import annotations

from stayfinite.runner.plan import MAIN, Plan
from stayfinite.runner.watch import Watch

PREFLIGHT = "preflight"


def watch_for(plan: Plan, *, key: str) -> Watch:
    """The watch of a process that belongs to this plan."""
    if plan.guard.get("purpose") == PREFLIGHT:
        from stayfinite.runner.rehearsing import RehearsalWatch  # late: other runs start sooner

        return RehearsalWatch(plan, key=key)
    if plan.lab is not None and key == MAIN:
        from stayfinite.runner.experimenting import LabWatch

        return LabWatch(plan, key=key)
    return Watch(plan, key=key)
