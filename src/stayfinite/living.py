"""What is alive: dotted names of modules and parameters, and the leaves of a graph."""

from __future__ import annotations

import contextlib
import csv
import gc
import io
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from itertools import compress
from types import GeneratorType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# Wrappers that put a prefix of their own before the user's names.
_WRAPPERS = {
    "DistributedDataParallel",
    "DataParallel",
    "OptimizedModule",
    "FullyShardedDataParallel",
}

T = TypeVar("T")
_FOUND: ContextVar[dict[type, list[Any]] | None] = ContextVar("stayfinite_living", default=None)
FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)
CSV_WRITER: type[Any] = type(csv.writer(io.StringIO()))
_ASKED_FOR = (*(nn.Module, Optimizer, LRScheduler, GradScaler, GeneratorType), *FILES, CSV_WRITER)
"""What an incident asks for: found together in its first look."""


class Names:
    """The names of everything that is alive now. Looks at every object once, so make it seldom."""

    def __init__(self) -> None:
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        self._holders: dict[int, tuple[nn.Module, str]] = {}
        for module in living(nn.Module):
            for name, child in _children(module, "_modules"):
                self._owners.setdefault(id(child), []).append((module, name))
            for kind in ("_parameters", "_buffers"):
                for name, tensor in _children(module, kind):
                    self._holders.setdefault(id(tensor), (module, name))

    def module(self, module: nn.Module, around: Iterable[nn.Module] = ()) -> tuple[str, str]:
        """(class name of the topmost owner, dotted name in it); owners in `around` go first."""
        names: list[str] = []
        current, seen = module, {id(module)}
        near = {id(other) for other in around}
        while (owner := self._owner(current, seen, near)) is not None:
            current = owner[0]
            names.append(owner[1])
            seen.add(id(current))
        return type(current).__name__, ".".join(reversed(names))

    def tensor(self, tensor: Tensor) -> str | None:
        """The dotted name of a parameter or buffer; None for other tensors."""
        holder = self._holders.get(id(tensor))
        if holder is None:
            return None
        prefix = self.module(holder[0])[1]
        return f"{prefix}.{holder[1]}" if prefix else holder[1]

    def _owner(
        self, module: nn.Module, seen: set[int], near: set[int]
    ) -> tuple[nn.Module, str] | None:
        owners = [
            (owner, name)
            for owner, name in self._owners.get(id(module), ())
            if id(owner) not in seen and type(owner).__name__ not in _WRAPPERS
        ]
        owners.sort(key=lambda owner: id(owner[0]) not in near)
        return owners[0] if owners else None


@contextlib.contextmanager
def one_look() -> Iterator[None]:
    """A block, such as one incident, in which all objects are looked through only once."""
    token = None if _FOUND.get() is not None else _FOUND.set({})
    try:
        yield
    finally:
        if token is not None:
            _FOUND.reset(token)


def living(base: type[T]) -> list[T]:
    """All objects of this class, or of one derived from it, that the garbage collector tracks."""
    found = _FOUND.get()
    if found is None:
        return _find([base])[base]
    if base not in found:
        found |= _find([base] if found else [*_ASKED_FOR, base])
    return list(found[base])


def _find(bases: Iterable[type]) -> dict[type, list[Any]]:
    kinds: set[type] = set(bases)
    todo = list(kinds)
    while todo:
        new: set[type] = set(type.__subclasses__(todo.pop())) - kinds
        kinds |= new
        todo += new
    # There are hundreds of thousands of objects, so none of them is looked at by a line of Python;
    # isinstance would also wake up proxies and lazy objects.
    things = gc.get_objects()
    ours = list(compress(things, map(kinds.__contains__, map(type, things))))
    return {base: [thing for thing in ours if issubclass(type(thing), base)] for base in bases}


def _children(module: nn.Module, kind: str) -> list[tuple[str, Any]]:
    held = module.__dict__.get(kind) or {}
    return [(name, child) for name, child in held.items() if child is not None]


def running_statistics() -> list[Tensor]:
    """The running statistics (BatchNorm's) of all living modules."""
    return [
        tensor
        for module in living(nn.Module)
        for name, tensor in _children(module, "_buffers")
        if name.startswith("running_")
    ]


def nodes_of(roots: Iterable[Tensor]) -> list[Any]:
    """Every node of the graph behind the roots, each once."""
    seen: dict[Any, None] = {}
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += [after for after, _ in node.next_functions if after is not None]
    return list(seen)


def leaves_of(roots: Iterable[Tensor]) -> list[Tensor]:
    """Every leaf that requires a gradient behind the roots; walks the whole graph."""
    leaves = [getattr(node, "variable", None) for node in nodes_of(roots)]
    return [leaf for leaf in leaves if leaf is not None]


def has_compiled() -> bool:
    """Whether torch.compile has been at work in this process."""
    # It takes seconds to import and is not imported to ask. Private: torch does not tell in public.
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    # With fullgraph, frames are not counted, but graphs are.
    counters = {} if dynamo is None else dynamo.counters
    return bool(counters.get("frames") or counters.get("stats"))


def has_compiled_module() -> bool:
    """Whether one of the modules that are alive was compiled."""
    # Both are private: torch has no public way to tell.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    return any(
        isinstance(module, dynamo.OptimizedModule) or module._compiled_call_impl is not None
        for module in living(nn.Module)
    )
