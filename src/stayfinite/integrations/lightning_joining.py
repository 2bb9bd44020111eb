"""Trainers of Lightning that watch for the command that watches their process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from stayfinite.detect.entrypoints import together, wrapped
from stayfinite.detect.hooks import Attachment
from stayfinite.errors import PackageError
from stayfinite.guard.post import free_post
from stayfinite.integrations.harmless import harmless

_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")
_joined: set[type] = set()


def join_trainers() -> Attachment:
    """Let each `fit` of the Trainers that are loaded lend its guard to the post of this process."""
    known = [getattr(sys.modules.get(name), "Trainer", None) for name in _LIBRARIES]
    return together(*(_join(each) for each in known if each is not None and each not in _joined))


def _join(trainers: type) -> Attachment:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _lent_callback(self):
                return original(self, *args, **kwargs)

        return fit

    _joined.add(trainers)
    attachment = wrapped(trainers, "fit", wrap)

    def remove() -> None:
        _joined.discard(trainers)
        attachment.remove()

    return Attachment(remove)


@contextlib.contextmanager
def _lent_callback(trainer: Any) -> Iterator[None]:
    """A callback of ours while it trains, if there is somebody to help."""
    before, ours = trainer.callbacks, None
    with harmless("adding a callback to a trainer"):
        ours = _callback_for(trainer)
        if ours is not None:
            trainer.callbacks = [*before, ours]
    try:
        yield
    finally:
        if ours is not None:
            ours.close()
            rest = [each for each in trainer.callbacks if each is not ours]
            trainer.callbacks = before if rest == before else rest


def _callback_for(trainer: Any) -> Any:
    if free_post() is None or not is_alone(trainer):
        return None
    try:
        from stayfinite.integrations.lightning import LentStayFinite, StayFinite
    except PackageError:  # the package is too old; the process is watched all the same
        return None
    has_one = any(isinstance(each, StayFinite) for each in trainer.callbacks)
    return None if has_one else LentStayFinite(sinks=[])


def is_alone(trainer: Any) -> bool:
    """Whether all of its training happens in this process."""
    return trainer.world_size == 1 and trainer.strategy.launcher is None
