"""Values copied into memory of our own and put back in place.

Tensors by their memory, many at once; plain python state by content.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from stayfinite.detect.memory import compact, undisturbed

Offload = Literal["none", "cpu"]
"""Where values are kept: on their own device, or in the host's memory."""
Memories = list[Tensor]
"""The tensors that hold one value."""
Pair = tuple[Tensor, Tensor]
"""Where to, and from where."""
Group = tuple[list[Tensor], list[Tensor]]
"""The same, many at once."""
_CPU = torch.device("cpu")


def memories(tensor: Tensor) -> list[Tensor]:
    """The tensors whose memory is the value: the tensor itself, or what it is made of.

    Nothing for what has no value yet, lazy or meta, and for what is replaced rather than written
    to: inference tensors and results that autograd remembers. Repeats that expand() made are
    left out, since they cannot be written to.
    """
    if is_simple(tensor):
        return [tensor]
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return []
    if tensor.is_inference() or tensor.grad_fn is not None:
        return []
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]  # the mesh of a DTensor is among them
        return [memory for part in parts if isinstance(part, Tensor) for memory in memories(part)]
    if is_odd(tensor) or tensor.is_contiguous():
        return [tensor]
    return [compact(tensor)]


def is_simple(tensor: Tensor) -> bool:
    """Whether it is an ordinary piece of memory, as nearly all are."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_meta
        and not tensor.is_inference()
        and tensor.grad_fn is None
    )


def is_odd(tensor: Tensor) -> bool:
    """Whether it can only be copied alone."""
    return (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    )


def size_of(tensor: Tensor) -> int:
    """Bytes of its elements; of a sparse one, as if it were dense."""
    return tensor.numel() * tensor.element_size()


def place_of(tensor: Tensor) -> tuple[int, ...]:
    """Where its memory is."""
    found = [memory for memory in memories(tensor) if memory.layout is torch.strided]
    return tuple(memory.data_ptr() for memory in found)


def like(tensor: Tensor, offload: Offload = "none") -> Tensor:
    """New memory for a value like this one."""
    if is_odd(tensor):
        return tensor.clone()
    device = tensor.device if offload == "none" else _CPU
    return torch.empty_like(tensor, device=device, requires_grad=False)


def grouped(pairs: Iterable[Pair]) -> list[Group]:
    """Pairs that one call can copy together, as two lists."""
    groups: dict[object, Group] = {}
    for to, source in pairs:
        odd_one = id(to) if is_odd(to) else None
        key = (to.dtype, source.dtype, to.device, source.device, odd_one)
        targets, sources = groups.setdefault(key, ([], []))
        targets.append(to)
        sources.append(source)
    return list(groups.values())


@torch.no_grad()
def copy_groups(groups: Iterable[Group]) -> None:
    """Copy each source into its target; few kernels for many tensors."""
    for targets, sources in groups:
        if len(targets) > 1:
            # One kernel for the whole list; the public copy_ needs one for each tensor.
            torch._foreach_copy_(targets, sources)
        else:
            targets[0].copy_(sources[0])


def copy_all(pairs: Iterable[Pair]) -> None:
    """Copy each second tensor into the first."""
    copy_groups(grouped(pairs))


@torch.no_grad()
def put_back(live: Sequence[Tensor], saved: Sequence[Sequence[Tensor]]) -> None:
    """Write saved memories into the tensors they came from.

    A tensor that was given another shape since gets memory of the old one.
    """
    pairs: list[Pair] = []
    for tensor, values in zip(live, saved, strict=True):
        now = memories(tensor)
        if [t.shape for t in now] == [t.shape for t in values]:
            pairs.extend(zip(now, values, strict=True))
        elif len(values) == 1:
            tensor.data = values[0].to(tensor.device, copy=True)
    copy_all(pairs)


class Cell(Protocol):
    """Something that changes; what it holds inside may be cells of their own."""

    name: str
    part: str

    def content(self) -> Any:
        """What is in it now, one level deep, safe from later changes of the cell."""

    def put_back(self, content: Any) -> None: ...


Contents = list[tuple[Cell, Any]]
"""Cells, and what was in each."""


def put_contents_back(contents: Contents) -> None:
    # What an object loads itself may replace tensors, so it comes before them.
    for cell, content in sorted(contents, key=lambda pair: not isinstance(pair[0], ProtocolCell)):
        cell.put_back(content)


def same(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Whether they hold the same objects."""
    return len(one) == len(two) and all(map(is_, one, two))


class _Named:
    def __init__(self, value: Any, name: str, part: str) -> None:
        self.value, self.name, self.part = value, name, part


class BoxCell(_Named):
    """A dict, list, deque or set, by what is in it."""

    def __init__(self, value: Any, name: str, part: str) -> None:
        super().__init__(value, name, part)
        is_dict, is_set = isinstance(value, dict), isinstance(value, set)
        self.content_type: type = dict if is_dict else set if is_set else list

    def content(self) -> Any:
        return self.content_type(self.value)

    def put_back(self, content: Any) -> None:
        # A box that refuses changes, as the configuration of a library may, has not changed.
        if self._has_still(content):
            return
        self.value.clear()
        (self.value.extend if self.content_type is list else self.value.update)(content)

    def _has_still(self, content: Any) -> bool:
        now = self.content()
        if isinstance(content, dict):
            return same([*now], [*content]) and same([*now.values()], [*content.values()])
        return now == content if isinstance(content, set) else same(now, content)


class ArrayCell(_Named):
    def content(self) -> Any:
        return self.value.copy()

    def put_back(self, content: np.ndarray[Any, Any]) -> None:
        self.value[...] = content


class AttributesCell(BoxCell):
    """The attributes of an object that are plain state; the others are not touched."""

    def __init__(self, owner: Any, name: str, part: str, skipped: Container[str] = ()) -> None:
        super().__init__(vars(owner), name, part)
        self.skipped = skipped

    def put_back(self, content: dict[str, Any]) -> None:
        now = self.value
        for key in [key for key in now if key not in content and self.is_ours(key, now[key])]:
            del now[key]
        for key, value in content.items():
            if now.get(key, now) is not value and self.is_ours(key, value, now.get(key)):
                now[key] = value

    def is_ours(self, key: str, *values: Any) -> bool:
        return key not in self.skipped and any(map(is_state, values))


class GradientsCell(_Named):
    """Copies of the gradients that parameters hold.

    The gradients themselves are only remembered weakly: most are soon dropped, and then their
    memory must be free. One that is gone comes back as a new tensor.
    """

    def __init__(self, params: Mapping[str, Tensor], part: str) -> None:
        super().__init__(list(params.values()), "gradients", part)
        self.names = [f"gradients.{name}" for name in params]

    def content(self) -> list[tuple[weakref.ref[Tensor], Tensor] | None]:
        gradients = [param.grad for param in self.value]
        return [None if g is None else (weakref.ref(g), g.detach().clone()) for g in gradients]

    @torch.no_grad()
    def put_back(self, content: list[tuple[weakref.ref[Tensor], Tensor] | None]) -> None:
        for param, kept in zip(self.value, content, strict=True):
            gradient = None if kept is None else kept[0]()
            if kept is not None and gradient is not None:
                with contextlib.suppress(RuntimeError):  # one that was expanded cannot be written
                    gradient.copy_(kept[1])
                    kept = None
            param.grad = gradient if kept is None else kept[1].clone()


class FrozenCell(_Named):
    """Which parameters want gradients."""

    def content(self) -> list[bool]:
        return [param.requires_grad for param in self.value]

    def put_back(self, content: list[bool]) -> None:
        for param, wanted in zip(self.value, content, strict=True):
            if param.requires_grad is not wanted:
                param.requires_grad_(wanted)


class ProtocolCell(_Named):
    """An object that gives and takes its state itself: state_dict and load_state_dict."""

    def content(self) -> Any:
        return _copied(self.value.state_dict())

    def put_back(self, content: Any) -> None:
        self.value.load_state_dict(_copied(content))


class FunctionsCell(_Named):
    """A state that one function reads and another writes, such as a generator's."""

    def __init__(
        self, name: str, part: str, read: Callable[[], Any], write: Callable[[Any], Any]
    ) -> None:
        super().__init__(None, name, part)
        self.content, self.put_back = read, write


def _copied(value: Any) -> Any:
    """A deep copy; tensors that belong to a graph cannot be copied by deepcopy."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (dict, list, tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        copies = {key: _copied(item) for key, item in items}
        return copies if isinstance(value, dict) else type(value)(copies.values())
    return copy.deepcopy(value)


class Kind(enum.Enum):
    """How a value of some type changes."""

    CONSTANT = enum.auto()
    """Never: who keeps the reference keeps the state."""
    TUPLE = enum.auto()
    """Only inside."""
    BOX = enum.auto()
    """A dict, list, deque or set."""
    RECORD = enum.auto()
    """A dataclass instance."""
    TENSOR = enum.auto()
    ARRAY = enum.auto()
    GENERATOR = enum.auto()
    OTHER = enum.auto()
    """Someone's machinery."""


_TYPES: tuple[tuple[Kind, tuple[type, ...]], ...] = (
    (Kind.CONSTANT, (int, float, bool, complex, str, bytes, type(None), range, slice, frozenset)),
    (Kind.CONSTANT, (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)),
    (Kind.CONSTANT, (np.generic, np.dtype, enum.Enum, decimal.Decimal, fractions.Fraction)),
    (Kind.CONSTANT, (datetime.date, datetime.time, datetime.timedelta)),
    (Kind.TENSOR, (Tensor,)),
    (Kind.TUPLE, (tuple,)),
    (Kind.BOX, (dict, list, deque, set)),
    (Kind.ARRAY, (np.ndarray,)),
    (Kind.GENERATOR, (torch.Generator, random.Random)),
)
_LEAVES = (Kind.CONSTANT, Kind.TENSOR, Kind.ARRAY, Kind.GENERATOR)
_DEEPEST = 16

# Asked for every attribute of every module, so the answer for a type is kept.
_known: dict[type, Kind] = {}
CONSTANTS: set[type] = set()
"""Types known to be constant."""


def kind_of(value: Any) -> Kind:
    type_ = type(value)
    kind = _known.get(type_)
    if kind is None:
        found = (kind for kind, types in _TYPES if issubclass(type_, types))
        kind = next(found, Kind.RECORD if _is_record(type_) else Kind.OTHER)
        if is_generator_type(type_):
            kind = Kind.GENERATOR
        _known[type_] = kind
        if kind is Kind.CONSTANT:
            CONSTANTS.add(type_)
    return kind


def is_generator_type(type_: type) -> bool:
    """Whether instances are random number generators of torch, python or numpy."""
    if issubclass(type_, (torch.Generator, random.Random)):
        return True
    # numpy imports these when they are first asked for: if nobody has, there is none.
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and issubclass(type_, (numpy.Generator, numpy.RandomState))


def _is_record(type_: type) -> bool:
    """Whether instances are dataclasses that can be changed."""
    if not dataclasses.is_dataclass(type_) or type_.__dictoffset__ == 0:
        return False
    return not type_.__dataclass_params__.frozen  # type: ignore[attr-defined]


def is_constant(value: Any) -> bool:
    """Whether the value never changes."""
    kind = kind_of(value)
    return kind is Kind.CONSTANT or (kind is Kind.TUPLE and all(map(is_constant, value)))


def is_state(value: Any, depth: int = 0) -> bool:
    """Whether the value is plain state: numbers, text, tensors, generators, and boxes of such.

    A box counts when it is empty or anything in it does; a list of modules or hooks does not.
    """
    kind = kind_of(value)
    if kind in _LEAVES:
        return True
    if kind is Kind.OTHER or depth > _DEEPEST:
        return False
    items = values_of(value)
    return not items or any(is_state(item, depth + 1) for item in items)


def values_of(value: Any) -> Collection[Any]:
    """What is inside a tuple, box or record."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple, deque, set)) else vars(value).values()


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """The same with keys, safe from changes meanwhile."""
    return list(value.items()) if isinstance(value, dict) else list(enumerate(values_of(value)))


# A sum is the quickest way to look at elements of these types.
_SUMMABLE = (torch.float32, torch.float64, torch.bfloat16)


class TensorCopies:
    """Memory for the value of each tensor; while these keep their form, filling is a call or two.

    `known` is memory from before, for each tensor; it is used where it fits. Of the tensors
    whose numbers are in `checked`, those that the host can add up are kept in `runs`, and the
    numbers of the others are in `not_in_runs`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        offload: Offload = "none",
        known: Sequence[Memories] | None = None,
        checked: Collection[int] = (),
    ) -> None:
        self.tensors, self._offload, self._checked = list(tensors), offload, checked
        self.memories = list(known) if known is not None else [[] for _ in self.tensors]
        self._arrange()

    def _arrange(self) -> None:
        """Make memory for what does not fit, and see what can be copied together."""
        now = [memories(tensor) for tensor in self.tensors]
        simple = {number for number, tensor in enumerate(self.tensors) if is_simple(tensor)}
        in_runs = {n for n in self._checked if n in simple and self._can_be_in_run(n)}
        self.not_in_runs = sorted(set(self._checked) - in_runs)
        missing: dict[torch.dtype, list[int]] = {}  # in runs, by type
        for number, values in enumerate(now):
            if not self._fits(self.memories[number], values):
                if number in in_runs:
                    missing.setdefault(values[0].dtype, []).append(number)
                else:
                    self.memories[number] = [like(value, self._offload) for value in values]
        for numbers in missing.values():
            new = side_by_side([self.tensors[number] for number in numbers])
            for number, memory in zip(numbers, new, strict=True):
                self.memories[number] = [memory]
        # The memory of the others must be looked for each time.
        self._others = [number for number in range(len(now)) if number not in simple]
        rest = sorted(simple - in_runs)
        self._groups = grouped((self.memories[n][0], now[n][0]) for n in rest)
        self.runs = runs_of((number, self.memories[number][0]) for number in in_runs)
        self._simple = [self.tensors[number] for number in sorted(simple)]
        self._forms = self._forms_now()

    def _can_be_in_run(self, number: int) -> bool:
        return self.tensors[number].is_cpu and self.tensors[number].dtype in _SUMMABLE

    def _forms_now(self) -> list[object]:
        return [(tensor.shape, tensor.dtype, tensor.is_cpu) for tensor in self._simple]

    def _fits(self, room: Memories, values: Memories) -> bool:
        return len(room) == len(values) and all(
            memory.shape == value.shape
            and memory.dtype is value.dtype
            and memory.layout is value.layout
            and memory.device == (value.device if self._offload == "none" else _CPU)
            for memory, value in zip(room, values, strict=True)
        )

    def fit(self) -> bool:
        """Whether all tensors that are copied together still have the form they had."""
        return self._forms_now() == self._forms

    def fill(self) -> None:
        """Copy the values of now."""
        if not self.fit():
            self._arrange()
        if self.runs:
            self.fill_runs()
        self.fill_rest()

    @undisturbed
    def fill_runs(self) -> None:
        for run in self.runs:
            run.fill(self.tensors)

    def fill_rest(self) -> None:
        """Copy the values of now that are not in runs."""
        for number in self._others:
            now = memories(self.tensors[number])
            if not self._fits(self.memories[number], now):
                self.memories[number] = [like(value, self._offload) for value in now]
            copy_all(zip(self.memories[number], now, strict=True))
        copy_groups(self._groups)

    def put_back(self, numbers: Iterable[int] | None = None) -> None:
        """Put the values back into the tensors, or into some of them."""
        which = list(range(len(self.tensors)) if numbers is None else numbers)
        put_back([self.tensors[n] for n in which], [self.memories[n] for n in which])

    @property
    def nbytes(self) -> int:
        return sum(size_of(memory) for room in self.memories for memory in room)


RUN = 1 << 19
"""Elements that are copied and then looked at, while the cache still holds them."""
_LINE = 16
"""Elements; each memory begins at a multiple of it."""

Part = tuple[int, Tensor, slice | None]
"""The number of a tensor, the memory of its value, and which elements; None for all of them."""


def side_by_side(values: Sequence[Tensor]) -> list[Tensor]:
    """New memory on the host for values like these, of one dtype; between them there are zeros."""
    lengths = [-(-value.numel() // _LINE) * _LINE for value in values]
    # Zeros that nobody has touched take no time.
    whole = torch.zeros(sum(lengths), dtype=values[0].dtype, device="cpu")
    parts = zip(whole.split(lengths), values, strict=True)
    return [part[: value.numel()].view(value.shape) for part, value in parts]


class MemoryRun:
    """Neighbours in memory that hold the values of some tensors, or of a part of one."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._sources = [(number, part) for number, _, part in parts]
        self._targets = [to if part is None else to.view(-1)[part] for _, to, part in parts]
        first, last = self._targets[0], self._targets[-1]
        length = last.storage_offset() + last.numel() - first.storage_offset()
        self.memory = first.as_strided((length,), (1,))
        """All of it in one piece, with the zeros in between."""

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values that these tensors have now."""
        sources = [
            tensors[number] if part is None else tensors[number].reshape(-1)[part]
            for number, part in self._sources
        ]
        torch._foreach_copy_(self._targets, sources)  # one call; copy_ would be one for each


def runs_of(memories: Iterable[tuple[int, Tensor]]) -> list[MemoryRun]:
    """Runs over the memory of numbered tensors, none much longer than `RUN` elements."""

    def place(pair: tuple[int, Tensor]) -> tuple[int, int]:
        return pair[1].untyped_storage().data_ptr(), int(pair[1].storage_offset())

    runs: list[list[Part]] = []
    end, left = (0, 0), 0
    for number, memory in sorted(memories, key=place):
        storage, start = place((number, memory))
        size = memory.numel()
        for first in range(0, max(size, 1), RUN):
            length = min(RUN, size - first)
            is_near = end[0] == storage and start - end[1] < _LINE
            if not runs or not is_near or length > left:
                runs.append([])
                left = RUN
            part = None if size <= RUN else slice(first, first + length)
            runs[-1].append((number, memory, part))
            start, left = start + length, left - length
            end = storage, start
    return [MemoryRun(parts) for parts in runs]
