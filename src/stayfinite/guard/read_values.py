"""Values that were not finite when the script read them: a test loss, a metric."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor

from stayfinite.locate.source import USER, Place, kind_of, relative, resolve, user_places
from stayfinite.records import NaNType, ReadValue

_MOST_PLACES = 50
# Where torch reads a tensor because the script formats or prints it.
_SHOWS = ("_tensor.py", "_tensor_str.py")
_LOSS = re.compile(r"loss|criterion|nll|entropy|perplexity|ppl|elbo|likelihood|objective", re.I)


class ValuesRead:
    """Notes each line in which the script read a NaN or an Inf, by `detect.numbers`.

    A loss that a backward pass begins from is not noted: training tells of it. With gradients on,
    a value without a graph is noted only in a line that speaks of a loss: a norm of gradients that
    overflowed under a loss scaler is no result. What torch and this package read is not noted.
    """

    def __init__(self, *, steps: Callable[[], int], folder: str | None) -> None:
        self._steps, self._folder = steps, folder
        self._seen: dict[tuple[str, int, int, bool], _Line] = {}
        self._trained_on: int | None = None  # the memory of the last bad loss of training
        self._last: tuple[int, tuple[str, int, int, bool]] | None = None

    def saw(self, tensor: Tensor, value: float, frame: FrameType) -> None:
        """The script read this value there."""
        # The script reads it, or torch on its behalf to show it.
        is_user = kind_of(frame.f_code) == USER
        if not is_user and not frame.f_code.co_filename.endswith(_SHOWS):
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
        line = self._seen.get(key)
        if line is None:
            line = _Line(place, has_graph=has_graph, is_certain=is_certain)
            is_known = is_certain or has_graph or line.as_record(self._folder).is_loss
            if not is_known or len(self._seen) >= _MOST_PLACES:
                return
            self._seen[key] = line
        line.times += 1
        line.step, line.value = self._steps(), value
        self._last = None if memory is None else (memory, key)

    def trains_on(self, loss: Tensor) -> None:
        """A backward pass begins from this bad loss; if it has just been read, that is no news."""
        self._trained_on = _memory(loss)
        if self._last is not None and self._last[0] == self._trained_on:
            key = self._last[1]
            self._last = None
            self._seen[key].times -= 1
            if not self._seen[key].times:
                del self._seen[key]

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
        lines = sorted(self._seen.values(), key=lambda line: -line.step)
        return tuple(line.as_record(self._folder) for line in lines)


class _Line:
    __slots__ = ("has_graph", "is_certain", "place", "step", "times", "value")

    def __init__(self, place: Place, *, has_graph: bool, is_certain: bool) -> None:
        self.place, self.has_graph, self.is_certain = place, has_graph, is_certain
        self.times = self.step = 0
        self.value = math.nan

    def as_record(self, folder: str | None) -> ReadValue:
        span, value = resolve(self.place, folder=folder), self.value
        kind = NaNType.POS_INF if value > 0 else NaNType.NEG_INF
        return ReadValue(
            nan_type=NaNType.NAN if math.isnan(value) else kind,
            file=span.file,
            line=span.line,
            code=span.code,
            times=self.times,
            step=self.step,
            is_loss=bool(_LOSS.search(span.code)),
            in_evaluation=not self.has_graph,
            is_certain=self.is_certain,
        )


def _memory(tensor: Tensor) -> int | None:
    """Where its number is; None where there is no plain memory."""
    try:
        return tensor.data_ptr() or None
    except RuntimeError:
        return None
