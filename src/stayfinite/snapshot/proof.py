"""Two moments of training compared byte by byte, item by item."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.errors import SnapshotError
from stayfinite.snapshot.cells import (
    ArrayCell,
    AttributesCell,
    Cell,
    FunctionsCell,
    GradientsCell,
    ProtocolCell,
)
from stayfinite.snapshot.census import Census, Item
from stayfinite.snapshot.copies import memories, place_of
from stayfinite.snapshot.plain import is_constant, is_state, items_of

Image = dict[str, Any]


def prove(
    look: Callable[[], Census], restore: Callable[[], None], step_fn: Callable[[], Any]
) -> None:
    """SnapshotError names the first item that a restore, or a step after it, gets wrong."""
    before = image(look(), with_identity=True)
    try:
        step_fn()
        stepped = image(look())
        restore()
        name = first_difference(before, image(look(), with_identity=True))
        if name is not None:
            raise SnapshotError(f"{name} is not as before after a restore.")
        step_fn()
        name = first_difference(stepped, image(look()))
        if name is not None:
            raise SnapshotError(
                f"{name} differs when the same step is run again after a restore: the step is "
                "not deterministic, or it depends on something that is not part of this state "
                "(pass its scheduler, scaler, ema, loader or generators too)."
            )
    finally:
        restore()


def first_difference(one: Image, two: Image) -> str | None:
    """The name of the first item that is not in both, or not the same."""
    names = [*one, *(name for name in two if name not in one)]
    return next((n for n in names if n not in one or n not in two or one[n] != two[n]), None)


def image(census: Census, *, with_identity: bool = False) -> Image:
    """The bytes of everything by name; with identity also which tensors and which memory."""
    named = [*_tensor_entries(census.items, with_identity), *_cell_entries(census.cells)]
    found: Image = {}
    for name, value in named:
        # Two things may have one name, such as a dict and the object that it belongs to.
        found[name if name not in found else f"{name} ({len(found)})"] = value
    return found


def _tensor_entries(items: Iterable[Item], with_identity: bool) -> Iterator[tuple[str, Any]]:
    for item in items:
        place = (id(item.tensor), place_of(item.tensor)) if with_identity else ()
        yield item.name, (_digest(item.tensor), *place)


def _cell_entries(cells: Iterable[Cell]) -> Iterator[tuple[str, Any]]:
    for cell in cells:
        if isinstance(cell, (FunctionsCell, ProtocolCell)):  # what they hold has no other entry
            yield cell.name, picture(cell.content(), deep=True)
            continue
        if isinstance(cell, GradientsCell):
            kept = [None if pair is None else _digest(pair[1]) for pair in cell.content()]
            yield from zip(cell.names, kept, strict=True)
            continue
        for number, (key, value) in enumerate(_entries(cell)):
            label = number if isinstance(key, Tensor) else key
            yield f"{cell.name}.{label}".replace("..", "."), picture(value)


def _entries(cell: Cell) -> list[tuple[Any, Any]]:
    content = cell.content()
    if isinstance(cell, AttributesCell):
        return [(k, v) for k, v in content.items() if k not in cell.skipped and is_state(v)]
    return [("", content)] if isinstance(cell, ArrayCell) else list(items_of(content))


def picture(value: Any, *, deep: bool = False) -> Any:
    """The value in a form that can be compared; a thing with an entry of its own by its type."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, tuple) or (deep and isinstance(value, list)):
        return [picture(item, deep=deep) for item in value]
    if deep and isinstance(value, Tensor):
        return _digest(value)
    if deep and isinstance(value, dict):
        return [(str(key), picture(item, deep=True)) for key, item in value.items()]
    return repr(value) if is_constant(value) else type(value).__name__


@torch.no_grad()
def _digest(tensor: Tensor) -> list[object]:
    """Form and bytes; nothing of a tensor without a value of its own."""
    found: list[object] = []
    for memory in memories(tensor):
        found += [memory.dtype, tuple(memory.shape)]
        found += [_bytes_digest(part) for part in _stored(memory)]
    return found


def _stored(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.strided:
        return [tensor.resolve_conj().resolve_neg()]
    if tensor.is_sparse:
        return [tensor.coalesce().indices(), tensor.coalesce().values()]
    return [tensor.to_dense()]


def _bytes_digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest()
