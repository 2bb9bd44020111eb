"""Values that were not finite when the script read them: a test loss, a metric."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor

from stayfinite.locate.source import (
    USER,
    Place,
    in_optimizer,
    kind_of,
    relative,
    resolve,
    user_places,
)
from stayfinite.records import NaNType, ReadValue

_MOST_PLACES = 50
# Where torch reads a tensor because the script formats or prints it.
_SHOWS = ("_tensor.py", "_tensor_str.py")
_LOSS = re.compile(r"loss|criterion|nll|entropy|perplexity|ppl|elbo|likelihood|objective", re.I)
_Key = tuple[str, int, int, bool]  # file, line, instruction, and whether it had a graph


class ValuesRead:
    """Notes each line in which the script read a NaN or an Inf, by `detect.numbers`.

    A loss that a backward pass begins from is not noted: training tells of it. With gradients on,
    a value without a graph is noted only in a line that speaks of a loss: a norm of gradients that
    overflowed under a loss scaler is no result. What torch, an optimizer and this package read is
    not noted.
    """

    def __init__(self, *, steps: Callable[[], int], folder: str | None) -> None:
        self._steps, self._folder = steps, folder
        self._seen: dict[_Key, ReadValue] = {}
        self._trained_on: int | None = None  # the memory of the last bad loss of training
        self._last: tuple[int, _Key] | None = None

    def saw(self, tensor: Tensor, value: float, frame: FrameType) -> None:
        """The script read this value there."""
        # The script reads it, or torch on its behalf to show it.
        is_user = kind_of(frame.f_code) == USER
        if not is_user and not frame.f_code.co_filename.endswith(_SHOWS):
            return
        if in_optimizer(frame):
            return
        place = self._place(frame)
        memory = _memory(tensor)
        if place is None or (memory is not None and memory == self._trained_on):
            return
        is_certain = not torch.is_grad_enabled()
        shown = None if is_user else frame.f_locals.get("self")  # torch has detached it
        with_graph = shown if isinstance(shown, Tensor) else tensor
        has_graph = not is_certain and (tensor.requires_grad or with_graph.requires_grad)
        key = place.code.co_filename, place.line, place.lasti, has_graph
        read = self._seen.get(key)
        if read is None:
            span = resolve(place, folder=self._folder)
            read = ReadValue(
                nan_type=NaNType.NAN,
                file=span.file,
                line=span.line,
                code=span.code,
                times=0,
                is_loss=bool(_LOSS.search(span.code)),
                in_evaluation=not has_graph,
                is_certain=is_certain,
            )
            is_known = is_certain or has_graph or read.is_loss
            if not is_known or len(self._seen) >= _MOST_PLACES:
                return
        infinite = NaNType.POS_INF if value > 0 else NaNType.NEG_INF
        kind = NaNType.NAN if math.isnan(value) else infinite
        self._seen[key] = dataclasses.replace(
            read, nan_type=kind, times=read.times + 1, step=self._steps()
        )
        self._last = None if memory is None else (memory, key)

    def trains_on(self, loss: Tensor) -> None:
        """A backward pass begins from this bad loss; if it has just been read, that is no news."""
        self._trained_on = _memory(loss)
        if self._last is not None and self._last[0] == self._trained_on:
            key, self._last = self._last[1], None
            read = self._seen.pop(key)
            if read.times > 1:
                self._seen[key] = dataclasses.replace(read, times=read.times - 1)

    def _place(self, frame: FrameType) -> Place | None:
        """The script's own line if there is one, else that of the library that it called."""
        places = user_places(frame)
        ours = (p for p in places if not relative(p.code.co_filename, self._folder).startswith("/"))
        return next(ours, places[0] if places else None)

    def forget(self) -> None:
        """Start again, in a process of its own."""
        self._seen.clear()

    def told(self) -> tuple[ReadValue, ...]:
        """One for each line, those that came last first."""
        return tuple(sorted(self._seen.values(), key=lambda read: -read.step))


def _memory(tensor: Tensor) -> int | None:
    """Where its number is; None where there is no plain memory."""
    try:
        return tensor.data_ptr() or None
    except RuntimeError:
        return None
