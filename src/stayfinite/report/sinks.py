"""Who is told of an incident: callables, and the trackers that run in this process."""

from __future__ import annotations

import contextlib
import importlib
import logging
import random
import sys
from collections.abc import Callable, Iterable

from stayfinite.records import Incident

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


def told_to(sinks: Iterable[Sink] | None) -> Sink:
    """Tells all of them; without any, the terminal and the trackers that are running.

    One that fails does not keep the others from being told, and is logged once.
    """
    chosen = [show, tell_trackers] if sinks is None else list(sinks)
    failed: set[int] = set()

    def tell(incident: Incident) -> None:
        for number, sink in enumerate(chosen):
            try:
                sink(incident)
            except Exception:
                if number not in failed:
                    failed.add(number)
                    logger.exception("a sink failed; it is told of later incidents all the same")

    return tell


def show(incident: Incident) -> None:
    """Print the report to stderr."""
    state = random.getstate()  # which rich draws from, even when it is loaded
    from stayfinite.report.terminal import show

    with _beside_bars():
        show(incident)
    random.setstate(state)


def _beside_bars() -> contextlib.AbstractContextManager[None]:
    """A block whose output does not begin in the middle of a progress bar of tqdm."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        return contextlib.nullcontext()
    beside: contextlib.AbstractContextManager[None] = bars.external_write_mode(file=sys.stderr)
    return beside


def tell_trackers(incident: Incident) -> None:
    """Tell every tracker that the script has set up itself; a failure of one is logged once."""
    for name, ours in _TRACKERS.items():
        if name not in sys.modules or ours in _failed:
            continue
        try:
            sink = importlib.import_module(f"stayfinite.integrations.{ours}").running()
            if sink is not None:
                sink(incident)
        except Exception:
            _failed.add(ours)
            logger.exception("%s could not be told of an incident; no more of them", name)


_failed: set[str] = set()
