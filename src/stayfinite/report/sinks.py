"""Who is told of incidents and forecasts: callables, and the trackers that run in this process."""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from stayfinite.records import Forecast, Incident, TensorSummary
from stayfinite.safely import Safely, beside_bars
from stayfinite.text import (
    count,
    forecast_line,
    library_line,
    on_rank,
    source_line,
    what_was_done,
)

logger = logging.getLogger("stayfinite")
Sink = Callable[[Incident], None]

# What a tracker's users have imported, and our file that knows it. Each has `running()`, which
# gives a sink for what is running now, or None.
_TRACKERS = {
    "torch.utils.tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "prometheus_client": "prometheus",
}
_failed: set[str] = set()


def told_to(sinks: Iterable[Sink] | None, *more: Sink) -> Sink:
    """Tells all of them; without any, the terminal and the trackers that are running; and `more`.

    One that fails does not keep the others from being told, and is logged once.
    """
    chosen = [*(unasked() if sinks is None else sinks), *more]
    for end in (getattr(sink, "end", None) for sink in chosen) if sinks is None else ():
        if end is not None:
            atexit.register(end)
    message = "a sink failed; it still gets later incidents"
    safely = [Safely(message) for _ in chosen]

    def tell(incident: Incident) -> None:
        for sink, failures in zip(chosen, safely, strict=True):
            try:
                sink(incident)
            except Exception as error:
                failures.note(error)

    return tell


def forecasts_told_to(sinks: Iterable[Any] | None, *more: Any) -> Callable[[Forecast], None]:
    """Tells the same sinks, and `more`, of forecasts: those that have a method `on_forecast`.

    Without any sinks, the terminal and the trackers that are running.
    """
    told = (*more, *(unasked() if sinks is None else sinks))
    chosen = [getattr(sink, "on_forecast", None) for sink in told]
    message = "a sink failed; it still gets later forecasts"
    safely = [(hear, Safely(message)) for hear in chosen if hear is not None]

    def tell(forecast: Forecast) -> None:
        for hear, failures in safely:
            try:
                hear(forecast)
            except Exception as error:
                failures.note(error)

    return tell


def unasked() -> list[Sink]:
    """Who is told where nobody was chosen."""
    return [terminal(), tell_trackers]


class Repeats:
    """How often each incident has come: those with one cause and line are one.

    So are the bad steps that follow directly on one where nothing was undone, and those of which
    nothing is known.
    """

    def __init__(self) -> None:
        self.times: dict[object, int] = {}
        self.first: dict[object, Incident] = {}
        self._last: tuple[object, int] | None = None

    def note(self, incident: Incident) -> int:
        """Count it: the how manieth it is of its kind; 0 for one that follows from another."""
        key: object = incident.fingerprint if _is_known(incident) else None
        is_passive = incident.outcome is not None and incident.outcome.strategy == "warn"
        follows = self._last is not None and is_passive and incident.step <= self._last[1] + 1
        if follows and self._last is not None:
            key = self._last[0]
        self._last = key, incident.step
        self.times[key] = self.times.get(key, 0) + 1
        self.first.setdefault(key, incident)
        return 0 if follows else self.times[key]

    def summary(self) -> str:
        """One line on what came more than once; empty if nothing did."""
        often = [(self.first[key], times) for key, times in self.times.items() if times > 1]
        if not often:
            return ""
        said = [f"{_place_of(first)} {times} times" for first, times in often[:3]]
        more = f" and {len(often) - 3} others" if len(often) > 3 else ""
        total = sum(self.times.values())
        return f"{count(total, 'bad step')}: {', '.join(said)}{more}"


def is_told(times: int) -> bool:
    """Whether the so manieth time is worth a line: the first, the tenth, the hundredth."""
    return times > 0 and str(times).strip("0") == "1"


def _is_known(incident: Incident) -> bool:
    return incident.diagnosis is not None and incident.origin is not None


class TerminalSink:
    """Prints to stderr: a report for an incident, one line for a forecast.

    Of ranks that train together only the one where it began prints it.
    An incident whose cause and place are those of an earlier one is counted, and told in one line
    the tenth time, the hundredth and so on.
    """

    def __init__(self) -> None:
        self._repeats = Repeats()

    def __call__(self, incident: Incident) -> None:
        if not is_of_this_rank(incident):
            return
        times = self._repeats.note(incident)
        if not is_told(times):
            return
        with beside_bars():
            if times > 1:
                print(_again(incident, times), file=sys.stderr)
                return
            with unchanged_random():
                from stayfinite.report.terminal import show

                show(incident)

    def on_forecast(self, forecast: Forecast) -> None:
        print_forecast(forecast)

    def end(self) -> None:
        """One line on what came more than once; told once."""
        summary = self._repeats.summary()
        self._repeats = Repeats()
        if summary:
            with beside_bars():
                print(f"stayfinite: {summary}", file=sys.stderr)


def terminal() -> TerminalSink:
    return TerminalSink()


def print_forecast(forecast: Forecast) -> None:
    """One line on stderr; what was done stands behind it."""
    with beside_bars():
        print(f"stayfinite: {forecast_line(forecast)}", file=sys.stderr)


@contextmanager
def unchanged_random() -> Iterator[None]:
    """rich draws from python's generator, even when it is loaded."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _again(incident: Incident, times: int) -> str:
    done = f"; {what_was_done(incident)}" if incident.outcome is not None else ""
    where = f"step {incident.step}{on_rank(incident)}"
    return f"stayfinite: {where}: {_place_of(incident)} again, {times} times so far{done}"


def _place_of(incident: Incident) -> str:
    """Cause and line, as far as they are known."""
    cause = incident.diagnosis.cause if incident.diagnosis is not None else "not finite"
    place, inner = source_line(incident.origin), library_line(incident.origin)
    at = f" at {place}" if place else ""
    return cause + at + (f" (in {inner})" if inner else "")


class TrackersSink:
    """Tells every tracker that the script has set up itself; a failure of one is logged once."""

    def __call__(self, incident: Incident) -> None:
        self._tell(lambda sink: sink(incident))

    def on_forecast(self, forecast: Forecast) -> None:
        self._tell(lambda sink: sink.on_forecast(forecast))

    def _tell(self, say: Callable[[Any], None]) -> None:
        for name, ours in _TRACKERS.items():
            if name not in sys.modules or ours in _failed:
                continue
            try:
                sink = importlib.import_module(f"stayfinite.integrations.{ours}").running()
                if sink is not None:
                    say(sink)
            except Exception:
                _failed.add(ours)
                logger.exception(
                    "%s could not be notified of an incident; it will not be notified again", name
                )


tell_trackers = TrackersSink()


def rank_here() -> int:
    """This process's rank: torch's if it is in a group, else the launcher's, else 0."""
    if "torch.distributed" in sys.modules:
        from stayfinite import distributed

        if distributed.world_size() > 1:
            return distributed.rank()
    value = os.environ.get("RANK", "")
    return int(value) if value.isdigit() else 0


def is_of_this_rank(incident: Incident) -> bool:
    """Whether it began here; rank 0 has those of which nobody knows where they began."""
    return incident.world == 1 or max(incident.rank, 0) == rank_here()


def guilty_tensor(incident: Incident) -> TensorSummary | None:
    """The tensor that went bad first, as far as it is known: made by the origin, or noticed."""
    made = incident.origin.outputs if incident.origin is not None else ()
    for tensor in made:
        if tensor.bad_count:
            return tensor
    names = {each.name for each in dataclasses.fields(TensorSummary)}
    for report in incident.reports:
        if report.has_nan and report.tensor_stats:
            stats = {key: value for key, value in report.tensor_stats.items() if key in names}
            return TensorSummary(name=report.location, shape=report.tensor_shape or (), **stats)
    return None
