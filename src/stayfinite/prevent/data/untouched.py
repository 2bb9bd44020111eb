"""Reading a loader without a trace: generators, counters and samplers are put back."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stayfinite.errors import InputError
from stayfinite.snapshot.cells import Cell, FunctionsCell, ProtocolCell
from stayfinite.snapshot.rng import PART, generator_cell, global_cells

_GENERATORS = (
    torch.Generator,
    random.Random,
    np.random.RandomState,
    np.random.Generator,
    np.random.BitGenerator,
)
_OPAQUE = (str, bytes, int, float, complex, type, types.ModuleType, Tensor, np.ndarray)
_LONGEST = 256
_MOST_OBJECTS = 20_000


@contextmanager
def as_before(loader: Any) -> Iterator[None]:
    """Afterwards every generator that reading the loader can draw from is where it was.

    These are the global ones of python, numpy, torch and the accelerators in use, and those that
    the loader, its dataset, samplers, transforms and functions hold. So are the numbers that a
    dataset in this process counts with, such as its epoch, and the state of one with a state_dict.
    """
    cells = [*global_cells(), *_cells(loader)]
    contents = [cell.content() for cell in cells]
    try:
        yield
    finally:
        for cell, content in zip(cells, contents, strict=True):
            cell.put_back(content)


def _cells(loader: Any) -> Iterator[Cell]:
    for item in reachable(_parts(loader)):
        if isinstance(item, _GENERATORS) and not isinstance(item, random.SystemRandom):
            yield generator_cell(item, "generator")
        elif item is loader or (isinstance(item, Dataset) and not _is_read_elsewhere(loader)):
            yield from _counting_cells(item)


def _parts(loader: Any) -> list[Any]:
    if not isinstance(loader, DataLoader):
        return [loader]
    names = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn", "worker_init_fn")
    return [getattr(loader, name, None) for name in names]


def _is_read_elsewhere(loader: Any) -> bool:
    return bool(getattr(loader, "num_workers", 0))


def _counting_cells(owner: Any) -> Iterator[Cell]:
    if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
        yield ProtocolCell(owner, "dataset", PART)
    own = getattr(owner, "__dict__", None)
    if isinstance(own, dict):
        yield FunctionsCell("dataset", PART, functools.partial(_numbers, own), own.update)


def _numbers(attributes: dict[str, Any]) -> dict[str, int | float]:
    return {key: value for key, value in attributes.items() if type(value) in (int, float)}


def reachable(roots: Iterable[Any]) -> list[Any]:
    """Objects that the roots lead to; long lists are not looked into: they hold the data."""
    found: dict[int, Any] = {}
    queue = deque(roots)
    while queue and len(found) < _MOST_OBJECTS:
        item = queue.popleft()
        if item is not None and id(item) not in found and not isinstance(item, _OPAQUE):
            found[id(item)] = item
            queue.extend(_inside(item))
    return list(found.values())


def _inside(item: Any) -> Iterable[Any]:
    if isinstance(item, _GENERATORS):
        return ()
    if isinstance(item, dict):
        return list(item.values()) if len(item) <= _LONGEST else ()
    if isinstance(item, list | tuple | set | frozenset | deque):
        return list(item) if len(item) <= _LONGEST else ()
    if isinstance(item, functools.partial):
        return (item.func, item.args, item.keywords)
    if isinstance(item, types.MethodType):
        return (item.__self__,)
    if isinstance(item, types.FunctionType):
        return [cell.cell_contents for cell in item.__closure__ or () if _is_full(cell)]
    own = getattr(item, "__dict__", None)
    return list(own.values()) if isinstance(own, dict) else ()


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # assigned later
        return False


def spare_sampler(loader: DataLoader[Any]) -> Any:
    """A copy of what gives the loader its indices, which can be used up in its place.

    It draws from the same generators in the same order. The dataset is not copied.
    """
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    data = getattr(loader.dataset, "__dict__", {}).values()
    inside = reachable([sampler])
    shared = [item for item in inside if isinstance(item, (*_GENERATORS, Dataset))]
    shared += [item for item in data if not isinstance(item, list | dict | set)]
    memo = {id(item): item for item in (loader.dataset, *shared)}
    with suppress(Exception):  # a sampler may hold anything
        return copy.deepcopy(sampler, memo)
    if not any(isinstance(item, Iterator) for item in inside):
        with suppress(Exception):
            return copy.copy(sampler)
    raise InputError(
        f"the sampler of the loader, a {type(sampler).__name__}, cannot be copied; reading it "
        "would use up the order that training gets. Give another loader of the same dataset, "
        "such as DataLoader(dataset, batch_size=64)."
    )
