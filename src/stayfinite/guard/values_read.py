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

    With gradients on, only what has a graph is noted: a norm of gradients that overflowed under a
    loss scaler is none of the script's results. What torch and this package read is not noted.
    """

    def __init__(self, *, steps: Callable[[], int], folder: str | None) -> None:
        self._steps, self._folder = steps, folder
        self._seen: dict[tuple[str, int, int, bool], _Line] = {}

    def saw(self, tensor: Tensor, value: float, frame: FrameType) -> None:
        """The script read this value there."""
        in_evaluation = not torch.is_grad_enabled()
        if not (in_evaluation or tensor.requires_grad) or not _is_shown(frame):
            return
        place = self._place(frame)
        if place is None:
            return
        key = place.code.co_filename, place.line, place.lasti, in_evaluation
        line = self._seen.get(key)
        if line is None:
            if len(self._seen) >= _MOST_PLACES:
                return
            line = self._seen[key] = _Line(place, in_evaluation)
        line.times += 1
        line.step, line.value = self._steps(), value

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
        return tuple(line.told(self._folder) for line in lines)


class _Line:
    __slots__ = ("in_evaluation", "place", "step", "times", "value")

    def __init__(self, place: Place, in_evaluation: bool) -> None:
        self.place, self.in_evaluation = place, in_evaluation
        self.times = self.step = 0
        self.value = math.nan

    def told(self, folder: str | None) -> ReadValue:
        span = resolve(self.place, folder=folder)
        return ReadValue(
            nan_type=_kind(self.value),
            file=span.file,
            line=span.line,
            code=span.code,
            times=self.times,
            step=self.step,
            is_loss=bool(_LOSS.search(span.code)),
            in_evaluation=self.in_evaluation,
        )


def _kind(value: float) -> NaNType:
    if math.isnan(value):
        return NaNType.NAN
    return NaNType.POS_INF if value > 0 else NaNType.NEG_INF


def _is_shown(frame: FrameType) -> bool:
    """Whether the script reads it, or torch on its behalf to show it."""
    if kind_of(frame.f_code) == USER:
        return True
    return frame.f_code.co_filename.endswith(_SHOWS)
