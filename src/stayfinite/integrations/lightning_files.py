"""Checkpoints of Lightning: one that is not finite is not written, and the last good one stays."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from stayfinite.detect.hooks import Attachment
from stayfinite.detect.scan import all_finite
from stayfinite.detect.walk import Named, named_tensors

logger = logging.getLogger("stayfinite")
_PARTS = ("state_dict", "current_model_state", "optimizer_states")


def refuse_bad_checkpoints(trainer: Any) -> Attachment:
    """Let no checkpoint of this trainer be written that is not finite."""
    strategy = trainer.strategy
    inner = strategy.checkpoint_io
    outer = FiniteCheckpoints(inner, trainer.lightning_module)
    strategy.checkpoint_io = outer

    def remove() -> None:
        if strategy.checkpoint_io is outer:
            strategy.checkpoint_io = inner

    return Attachment(remove)


class FiniteCheckpoints:
    """Stands before a strategy's `checkpoint_io`, which does the writing."""

    def __init__(self, inner: Any, module: nn.Module) -> None:
        self._inner = inner
        # A mask may hold -inf on purpose.
        self._meant = {name for name, value in module.state_dict().items() if _is_bad(value)}
        self._is_refusing = False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, *args: Any, **more: Any
    ) -> None:
        """Write it, unless something in it is not finite."""
        bad = next((name for name, value in self._named(checkpoint) if _is_bad(value)), None)
        self._is_refusing = bad is not None
        if bad is None:
            self._inner.save_checkpoint(checkpoint, path, *args, **more)
        else:
            logger.error("%s was not saved: %s is not finite; older files are kept", path, bad)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it, unless what was to take its place was refused."""
        if not self._is_refusing:
            self._inner.remove_checkpoint(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _named(self, checkpoint: Mapping[str, Any]) -> Iterator[Named]:
        for part in _PARTS:
            for path, tensor in named_tensors(checkpoint.get(part), part):
                if path.removeprefix(f"{part}.") not in self._meant:
                    yield path, tensor


def _is_bad(value: Any) -> bool:
    return not all_finite([tensor for _, tensor in named_tensors(value, "")])
