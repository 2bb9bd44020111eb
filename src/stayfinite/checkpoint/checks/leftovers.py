"""Tensors of a model that a checkpoint does not have: they would stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.nn.parameter import is_lazy

from stayfinite.checkpoint.format.tally import Tally, tally
from stayfinite.checkpoint.modules import Place
from stayfinite.checkpoint.problems import Problem

_LARGE = 1e6
_TINY = 1e-30


def leftover_problems(
    missing: Sequence[Place], part: str, *, strict: bool, is_complete: bool
) -> Iterator[Problem]:
    """An error for each that should have been saved, and for each that is no usable value.

    A non-persistent buffer is never in a file of others: its module makes it anew.
    """
    for place in missing:
        key = f"{part}.{place.name}"
        is_derived = place.kind == "non-persistent buffer" and not is_complete
        if strict and not is_derived:
            yield Problem(kind="missing", key=key, message=_missing(place))
            continue
        yield from _left(place, key)
        if not is_derived:
            message = "is not in the file and keeps the value that the model has now."
            yield Problem(kind="missing", key=key, message=message, is_error=False)


def _missing(place: Place) -> str:
    if place.kind == "attribute":
        return (
            "is not in the file: the model holds it as a plain attribute, which state_dict() "
            "leaves out, so it would start again from its default. Use register_buffer(), or "
            "save with save_checkpoint()."
        )
    return f"is not in the file, and the model has it as a {place.kind}."


def _left(place: Place, key: str) -> Iterator[Problem]:
    """Values that look as if nobody had ever set them."""
    tensor = place.tensor
    if tensor is None or is_lazy(tensor) or tensor.is_meta:
        message = "is not in the file and has no value in the model either."
        yield Problem(kind="leftover", key=key, message=message)
        return
    reason = _suspicion(place, tally(tensor))
    if reason:
        message = f"is not in the file, and in the model it looks uninitialised: {reason}."
        yield Problem(kind="leftover", key=key, message=message)


def _suspicion(place: Place, values: Tally) -> str | None:
    """Why the values cannot be meant; buffers may hold anything but NaN."""
    if values.has_nan or (place.kind == "parameter" and not values.is_finite):
        return f"it holds {values.words}"
    if place.kind == "parameter" and (values.largest > _LARGE or 0 < values.largest < _TINY):
        return f"its largest magnitude is {values.largest:.3g}"
    return None
