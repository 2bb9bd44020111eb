"""One tensor in a batch or an output, replaced by a spoiled copy."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from stayfinite.detect.walk import children, is_container
from stayfinite.testing.harm import Harm, Hit


def harmed(
    value: Any, harm: Harm, *, location: str, step: int, path: str | None = None
) -> tuple[Any, Hit] | None:
    """The nested value with a spoiled copy of one tensor in it; None if it has none that fits.

    `path` chooses the tensor; all that is not changed is the very same object.
    """
    found = [(name, tensor) for name, tensor in _tensors(value, location) if harm.fits(tensor)]
    wanted = None if path is None else f"{location}.{path}"
    for name, tensor in found:
        if wanted is None or name == wanted:
            spoiled, hit = harm.copy(tensor, location=name, step=step)
            return _swapped(value, tensor, spoiled), hit
    return None


def paths_in(value: Any) -> list[str]:
    """The paths that `harmed` knows in a value."""
    return [name.removeprefix(".") for name, _ in _tensors(value, "")]


def _tensors(value: Any, location: str) -> Iterator[tuple[str, Tensor]]:
    """Only real ones: numbers and arrays would come as copies."""
    if isinstance(value, Tensor):
        yield location, value
    elif is_container(value):
        for key, item in children(value):
            yield from _tensors(item, f"{location}.{key}")


def _swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    """The value with `old` replaced, in copies of the containers that hold it."""
    if value is old:
        return new
    if isinstance(value, Tensor) or not is_container(value):
        return value
    items = [(key, item, _swapped(item, old, new)) for key, item in children(value)]
    changed = [(key, after) for key, before, after in items if before is not after]
    return _with_items(value, [after for _, _, after in items], changed) if changed else value


def _with_items(value: Any, items: list[Any], changed: list[tuple[Any, Any]]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    if isinstance(value, (list, tuple)):
        return type(value)(items)
    result = copy.copy(value)
    for key, item in changed:
        if dataclasses.is_dataclass(value) and not hasattr(value, "items"):
            object.__setattr__(result, key, item)
        else:
            result[key] = item
    return result
