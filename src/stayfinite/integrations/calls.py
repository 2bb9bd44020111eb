"""The calls of a model in a loop that is not ours, to run them again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from stayfinite.detect.hooks import Attachment
from stayfinite.detect.repeats import is_run_again
from stayfinite.detect.scan import all_finite
from stayfinite.detect.walk import named_tensors
from stayfinite.guard.job import Job
from stayfinite.guard.proving import NO_BATCH
from stayfinite.guard.replay import CannotReplayError
from stayfinite.integrations.harmless import harmless
from stayfinite.locate.source import Place, call_at, user_place

Backward = Callable[[Tensor], Any]


class RecordedCalls:
    """What the model was called with in the step that is under way; by reference.

    Its own loss, or else what it gives out, is all that can be computed anew: what the loop
    made of that is not known here.
    """

    def __init__(self, model: nn.Module, job: Job, backward: Backward) -> None:
        self._model, self._job, self._backward = model, job, backward
        self._calls: list[tuple[Place | None, tuple[Any, ...], dict[str, Any]]] = []

    def attach(self) -> Attachment:
        hook = self._model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)

        def remove() -> None:
            hook.remove()
            self._calls.clear()

        return Attachment(remove)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_dynamo_compiling() or is_run_again() or not torch.is_grad_enabled():
            return
        with harmless("noting a call of the model"):
            if not self._job.has_begun:
                self._calls.clear()
            self._calls.append((user_place(sys._getframe(1)), args, kwargs))

    def batch(self) -> Any:
        """What the only call was given; NO_BATCH if there were several."""
        if len(self._calls) != 1:
            return NO_BATCH
        _, args, kwargs = self._calls[0]
        return [*args, kwargs]

    def again(self, batch: Any) -> None:
        """Run the calls again, each with a backward pass; NO_BATCH is what they were given."""
        if not self._calls:
            raise CannotReplayError("no call of the model is known")
        calls = self._calls
        if batch is not NO_BATCH:
            calls = [(calls[0][0], tuple(batch[:-1]), batch[-1])]
        for place, args, kwargs in calls:
            loss = _loss(call_at(place, self._model, *args, **kwargs))
            if loss is not None:
                self._backward(loss)


def _loss(output: Any) -> Tensor | None:
    """The model's own loss; without one, the sum of something bad that it gives out, if any."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.numel() == 1:
        return own
    bad = next(_bad(output), None)
    return None if bad is None else bad.sum()


def _bad(output: Any) -> Iterator[Tensor]:
    for _, tensor in named_tensors(output, ""):
        if tensor.requires_grad and not all_finite([tensor]):
            yield tensor
