"""What the tracer writes down, and the walk back from a bad value to its birth."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from stayfinite.locate.source import Place
from stayfinite.records import HopKind, NaNType, Phase, TensorSummary


@dataclass(frozen=True, slots=True)
class Site:
    """Where in the program something ran: place, modules around it, and how these were entered."""

    place: Place | None
    modules: tuple[nn.Module, ...] = ()
    entry: Place | None = None
    made_node: bool = False
    made_in: str | None = None  # the backward node that made it, in a double backward


@dataclass(slots=True, eq=False)
class Event:
    """An operation whose output was not finite."""

    order: int
    kind: HopKind
    op: str
    phase: Phase
    site: Site
    nan_type: NaNType
    clock: int
    node: str | None = None
    parents: tuple[Event, ...] = ()
    inputs: tuple[TensorSummary, ...] = ()
    outputs: tuple[TensorSummary, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


def ancestors(noticed: Iterable[Event]) -> dict[Event, Event | None]:
    """Every event that leads to the noticed ones, each with the next one on the way there."""
    following: dict[Event, Event | None] = {}
    queue: deque[tuple[Event, Event | None]] = deque((event, None) for event in noticed)
    while queue:
        event, after = queue.popleft()
        if event in following:
            continue
        following[event] = after
        queue.extend((parent, event) for parent in event.parents)
    return following


# Ops that pick or fold elements: where a masked-out value is taken after all.
_PICKERS = ("nll_loss", "gather", "index", "sum", "mean", "amax", "max", "select", "logsumexp")


def guilty(events: Iterable[Event]) -> Event | None:
    """The first event that is nobody else's consequence.

    A constant Inf that somebody wrote on purpose is blameless, so behind one the
    first operation that turned it into something else is taken.
    """
    ordered = sorted(events, key=lambda event: event.order)
    for event in ordered:
        if event.kind in ("birth", "foreign", "allocation"):
            return event
    for event in ordered:
        if event.kind == "conversion":
            return event
    for event in ordered:
        if event.kind == "spread" and event.op.split(".")[1].startswith(_PICKERS):
            return event
    return ordered[0] if ordered else None


def path(event: Event, following: dict[Event, Event | None]) -> list[Event]:
    """The hops from the event to the value that was noticed, oldest first."""
    hops = [event]
    while (after := following[hops[-1]]) is not None:
        hops.append(after)
    return hops
