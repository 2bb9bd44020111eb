"""What changes when a checkpoint's dtypes are not the model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from stayfinite.checkpoint.format.held import Held
from stayfinite.checkpoint.modules import Place
from stayfinite.checkpoint.problems import Problem

_NEARLY_MAX = 0.99


def dtype_problems(moves: Sequence[tuple[Place, Held]], part: str) -> Iterator[Problem]:
    """Values that do not survive are errors; lost precision is one warning for all tensors."""
    narrowed: dict[tuple[str, str, bool], list[str]] = {}
    for place, held in moves:
        if place.tensor is None or place.tensor.dtype == held.dtype:
            continue
        key, target = f"{part}.{place.name}", place.tensor.dtype
        if _family(held.dtype) != _family(target):
            message = f"is {name_of(held.dtype)} in the file and {name_of(target)} in the model."
            yield Problem(kind="dtype", key=key, message=message)
        elif target.is_floating_point:
            cut_off = list(_overflows(key, held, target))
            yield from cut_off
            if not cut_off:
                is_narrow = held.dtype.itemsize < target.itemsize
                kinds = name_of(held.dtype), name_of(target), is_narrow
                narrowed.setdefault(kinds, []).append(key)
    for (stored, present, was_saved_narrow), keys in narrowed.items():
        lost = "was lost when it was saved" if was_saved_narrow else "is lost by loading"
        others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        message = f"{others} is {stored} in the file and {present} in the model: precision {lost}."
        yield Problem(kind="narrowed", key=keys[0], message=message.strip(), is_error=False)


def _overflows(key: str, held: Held, target: torch.dtype) -> Iterator[Problem]:
    largest = held.tally.largest
    if largest > torch.finfo(target).max:
        message = f"holds {largest:.4g}, which is Inf in the model's {name_of(target)}."
        yield Problem(kind="narrowed", key=key, message=message)
    elif held.dtype.itemsize < target.itemsize and largest >= _limit(held.dtype):
        message = (
            f"holds {largest:.4g}, the limit of the file's {name_of(held.dtype)}: it was cut off "
            f"when it was saved, and the model has {name_of(target)}."
        )
        yield Problem(kind="narrowed", key=key, message=message)


def _limit(dtype: torch.dtype) -> float:
    return _NEARLY_MAX * torch.finfo(dtype).max


def _family(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "integer"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether floats of this dtype have fewer bits."""
    both = dtype.is_floating_point and than.is_floating_point
    return both and dtype.itemsize < than.itemsize
