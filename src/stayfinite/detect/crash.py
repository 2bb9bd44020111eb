"""When a script dies by itself: was it a non-finite value that killed it?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor

from stayfinite.detect.scan import classify
from stayfinite.detect.walk import Named
from stayfinite.records import NaNType

# What torch and careful scripts say when they meet one.
_TELLING = re.compile(
    r"\bnan\b|\binf(inite|inity)?\b|non-?finite|not finite|invalid values|within the support"
    r"|positive-?definite|singular|converge|probability tensor",
    re.IGNORECASE,
)
_FRAMES = 8
_MOST = 500


def bad_values_of(error: BaseException) -> list[Named]:
    """NaN tensors in the variables around the error, innermost frame first; mostly none.

    Only where the message speaks of one, or where the script left by sys.exit() with a NaN
    number at hand: an ordinary bug beside NaN-padded data is no incident.
    """
    left = isinstance(error, SystemExit)
    if not left and not _TELLING.search(str(error)):
        return []
    frames = _frames(error)[: 1 if left else _FRAMES]
    for frame in frames:
        found = [(name, tensor) for name, tensor in _tensors(frame) if _is_nan(tensor)]
        found = [pair for pair in found if pair[1].numel() == 1] if left else found
        if found:
            return found
    return []


def _frames(error: BaseException) -> list[FrameType]:
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


def _tensors(frame: FrameType) -> Iterator[Named]:
    """Tensors in local variables, and one level inside containers and distributions."""
    seen = 0
    for name, value in frame.f_locals.items():
        for label, item in [(name, value), *_inside(name, value)]:
            seen += 1
            if isinstance(item, Tensor) and seen < _MOST:
                yield label, item


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{name}.{key}", item) for key, item in list(value.items())[:50]]
    if isinstance(value, (list, tuple)):
        return [(f"{name}.{index}", item) for index, item in enumerate(value[:50])]
    return []


def _is_nan(tensor: Tensor) -> bool:
    return classify(tensor) is NaNType.NAN
