"""Which watch a plan asks for."""

from __future__ import annotations

from stayfinite.runner.plan import Plan
from stayfinite.runner.rehearsing import RehearsalWatch
from stayfinite.runner.watch import Watch

PREFLIGHT = "preflight"


def watch_for(plan: Plan, *, key: str) -> Watch:
    """The watch of a process that belongs to this plan."""
    is_preflight = plan.guard.get("purpose") == PREFLIGHT
    return (RehearsalWatch if is_preflight else Watch)(plan, key=key)
