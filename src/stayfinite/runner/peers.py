"""Processes that train together: when one is stopped, the others must not wait for it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from types import ModuleType
from typing import Any

from stayfinite.records import Incident
from stayfinite.runner import tree
from stayfinite.runner.ending import is_ours
from stayfinite.runner.imports import after_import
from stayfinite.runner.watch import Watch

GRACE = 1.0  # seconds in which the other ranks may still find out by themselves
PATIENCE = 4.0  # seconds for a stopped rank to unwind before its peers are ended anyway

# Raised where a process waits for one that we ended; by name, since torch may not be there.
_MACHINERY = frozenset(
    [
        "torch.multiprocessing.spawn.ProcessRaisedException",
        "torch.multiprocessing.spawn.ProcessExitedException",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
        "torch.distributed.DistBackendError",
        "torch.distributed.DistNetworkError",
        "concurrent.futures.process.BrokenProcessPool",
    ]
)
_LOST_PEER = ("gloo", "closed by peer", "reset by peer", "Connection closed", "Broken pipe")


def watch_group(watch: Watch) -> None:
    """Note when this process joins a group, and end the waiting of its peers when it stops.

    They are ended when this process has unwound, or soon if it waits for them in doing so.
    """
    watch.listeners.append(_end_peers_soon)

    def react(module: ModuleType) -> None:
        theirs = module.init_process_group

        @functools.wraps(theirs)
        def init_process_group(*args: Any, **options: Any) -> Any:
            result = theirs(*args, **options)
            watch.join_group()
            return result

        module.init_process_group = init_process_group  # type: ignore[attr-defined]

    after_import("torch.distributed.distributed_c10d", react)


def is_consequence(error: BaseException, watch: Watch) -> bool:
    """Whether the error is our own stop, or a process noticing that we stopped another."""
    if is_ours(error):
        return True
    kind = type(error)
    lost = watch.in_group and isinstance(error, RuntimeError)
    if f"{kind.__module__}.{kind.__qualname__}" not in _MACHINERY and not (
        lost and any(words in str(error) for words in _LOST_PEER)
    ):
        return False
    return any(record.stopped for record in tree.load(watch.plan.folder))


def end_peers(watch: Watch) -> None:
    """End the peers that still wait for this process, if it was stopped."""
    if not (_may_end_peers(watch) and watch.has_stopped):
        return
    _send(signal.SIGTERM, _waiting_after(GRACE, watch))
    # A handler of the script's own cannot run while the process waits in a collective.
    _send(signal.SIGKILL, _waiting_after(PATIENCE, watch))


def _end_peers_soon(watch: Watch, incident: Incident) -> None:
    end_peers_soon(watch)


def end_peers_soon(watch: Watch) -> None:
    """End the peers after a while, for the case that this process waits for them."""
    if _may_end_peers(watch):
        timer = threading.Timer(PATIENCE, end_peers, args=(watch,))
        timer.daemon = True
        timer.start()


def _may_end_peers(watch: Watch) -> bool:
    return watch.in_group and watch.plan.stops and watch.plan.ends_peers


def _waiting_after(seconds: float, watch: Watch) -> list[int]:
    deadline = time.monotonic() + seconds
    while (waiting := _waiting(watch)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return waiting


def _waiting(watch: Watch) -> list[int]:
    # The process that reports for all is spared: it hears of the loss from the group itself.
    spared = {watch.pid, watch.plan.pid}
    records = tree.load(watch.plan.folder)
    peers = (r for r in records if r.in_group and not r.stopped and r.pid not in spared)
    return [r.pid for r in peers if tree.is_running(r)]


def _send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
