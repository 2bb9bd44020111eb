"""The guard over a whole process, and one that stands in for it while a framework trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from stayfinite.detect.hooks import Attachment
from stayfinite.guard.discover import UNATTENDED
from stayfinite.guard.guard import Guard
from stayfinite.guard.job import Job
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.settings import GuardSettings

_SHARED = (
    *("incidents", "evidence", "_tracing", "_aside", "_losses", "_afterwards"),
    *("_last_look", "_on_incident", "on_begin", "on_bad_loss"),
)
_COPIED = ("scaler_skips", "stopped", "crashed", "_incident_clock", "_was_skipped")
_STOP = RecoveryConfig(
    primary_strategy=RecoveryStrategy.ABORT, fallback_strategy=RecoveryStrategy.ABORT
)
_open: list[Post] = []


class Post:
    """Whoever watches this process: a guard of its own, or one that a framework lends.

    `attach` attaches the first, now and whenever the other has gone. Integrations find the post
    until `close()`.
    """

    def __init__(self, guard: Guard, attach: Callable[[Guard], None]) -> None:
        self.guard = guard
        self._attach = attach
        self._is_taken = False
        attach(guard)
        _open.append(self)

    @property
    def is_free(self) -> bool:
        """Whether another guard may come; not where nothing is ever undone."""
        is_watching = self.guard._attachment is not None
        return is_watching and not self._is_taken and self.guard.settings.on_nan != "warn"

    @property
    def stops(self) -> bool:
        """Whether the first bad step is the last one."""
        return self.guard.settings.on_nan == "stop"

    @property
    def settings(self) -> GuardSettings:
        """For the guard that comes: its jobs say what is done, and the tracer is shared."""
        return dataclasses.replace(self.guard.settings, on_nan="recover", trace="never")

    @property
    def config(self) -> RecoveryConfig:
        """For the jobs of the guard that comes."""
        return _STOP if self.stops else UNATTENDED

    def hand_over(self, guard: Guard) -> Attachment:
        """Let `guard`, which is not attached yet, watch in the place of the first, until removal.

        It knows all that the first one knew, and the other way round.
        """
        first = self.guard
        _detach(first)
        others = _take_jobs(guard, first)
        for name in (*_SHARED, *_COPIED):
            setattr(guard, name, getattr(first, name))
        self.guard, self._is_taken = guard, True
        guard.attach()

        def give_back() -> None:
            for key in others:
                guard.jobs.pop(key, None)
            guard.close()
            for name in _COPIED:
                setattr(first, name, getattr(guard, name))
            self.guard, self._is_taken = first, False
            if self in _open:
                self._attach(first)

        return Attachment(give_back)

    def close(self) -> None:
        """No guard comes any more, and whoever is there stops watching."""
        if self in _open:
            _open.remove(self)
        self.guard.close()


def _detach(guard: Guard) -> None:
    attachment, guard._attachment = guard._attachment, None
    if attachment is not None:
        attachment.flush()
        attachment.remove()


def _take_jobs(guard: Guard, first: Guard) -> list[int]:
    """Jobs of other optimizers come along; their keys. Its own know more than those of `first`."""
    for key in set(guard.jobs) & set(first.jobs):
        first.jobs.pop(key).close()
    others = list(first.jobs)
    guard.jobs |= first.jobs
    return others


def free_post() -> Post | None:
    """The post over this process, if there is one whose place can be taken."""
    return next((post for post in _open if post.is_free), None)


class WithoutSnapshots(Job):
    """A job that ends with its first bad step, and needs no memory for going back."""

    def _take_snapshot(self) -> bool:
        return True
