"""Where values came from, and the walk back from a bad value to its birth.

What is known is kept by event, by memory and by autograd node.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint

from stayfinite.locate.operators import OpInfo, is_bad, tensors_in
from stayfinite.locate.samples import Delivery
from stayfinite.locate.source import ENGINE, Place, kind_of, own_place
from stayfinite.records import HopKind, NaNType, Phase, TensorSummary

# Private: torch has no public way to the node whose backward runs now, nor to the number that the
# next node will get.
running_node: Callable[[], Any] = torch._C._current_autograd_node
_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


@dataclass(frozen=True, slots=True)
class Site:
    """Where in the program something ran: place, modules around it, and how these were entered."""

    place: Place | None
    modules: tuple[nn.Module, ...] = ()
    entry: Place | None = None
    made_node: bool = False
    made_in: str | None = None  # the backward node that made it, in a double backward
    inner: Place | None = None  # the line of an installed package that runs, if `place` called one

    @property
    def innermost(self) -> Place | None:
        """The line that runs, whoever wrote it."""
        return self.inner or self.place


@dataclass(slots=True, eq=False)
class Event:
    """An operation whose output was not finite."""

    order: int
    kind: HopKind
    op: str
    phase: Phase
    site: Site
    nan_type: NaNType
    clock: int
    node: str | None = None
    parents: tuple[Event, ...] = ()
    inputs: tuple[TensorSummary, ...] = ()
    outputs: tuple[TensorSummary, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


def ancestors(noticed: Iterable[Event]) -> dict[Event, Event | None]:
    """Every event that leads to the noticed ones, each with the next one on the way there."""
    following: dict[Event, Event | None] = {}
    queue: deque[tuple[Event, Event | None]] = deque((event, None) for event in noticed)
    while queue:
        event, after = queue.popleft()
        if event in following:
            continue
        following[event] = after
        queue.extend((parent, event) for parent in event.parents)
    return following


# Ops that pick or fold elements: where a masked-out value is taken after all.
_PICKERS = ("nll_loss", "gather", "index", "sum", "mean", "amax", "max", "select", "logsumexp")


def guilty(events: Iterable[Event]) -> Event | None:
    """The first event that is nobody else's consequence.

    A constant Inf that somebody wrote on purpose is blameless, so behind one the
    first operation that turned it into something else is taken.
    """
    ordered = sorted(events, key=lambda event: event.order)
    births = (event for event in ordered if event.kind in ("birth", "foreign", "allocation"))
    turns = (event for event in ordered if event.kind == "conversion")
    spreads = (event for event in ordered if event.kind == "spread")
    picks = (event for event in spreads if event.op.split(".")[1].startswith(_PICKERS))
    return next(chain(births, turns, picks, ordered), None)


def path(event: Event, following: dict[Event, Event | None]) -> list[Event]:
    """The hops from the event to the value that was noticed, oldest first."""
    hops = [event]
    while (after := following[hops[-1]]) is not None:
        hops.append(after)
    return hops


class Raw(NamedTuple):
    """Memory that was allocated at `site` and of which `left` elements are not written yet."""

    site: Site
    left: int


class Made(NamedTuple):
    """The operation behind a value, those behind its inputs, and whether the batch is in it."""

    ops: tuple[str, ...]
    from_batch: bool
    deliveries: tuple[Delivery, ...] = ()


_MOST_OPS = 9
Line = tuple[Place | None, str, int]


class Provenance:
    """Which operation made a value, which memory was never written, which line ran how often."""

    def __init__(self) -> None:
        self.labels: StorageMap[str] = StorageMap()
        self.names: StorageMap[str] = StorageMap()
        self.carried: StorageMap[str] = StorageMap()  # from one step to the next, in a variable
        self._raw: StorageMap[Raw] = StorageMap()
        self._made: StorageMap[Made] = StorageMap()
        self._runs: dict[Line, int] = {}
        self._runs_before: dict[Line, int] = {}

    def next_step(self) -> None:
        self._runs_before, self._runs = self._runs, {}

    def note_run(self, site: Site, op: str) -> None:
        line = _line(site, op)
        self._runs[line] = self._runs.get(line, 0) + 1

    def runs(self, site: Site, op: str) -> int:
        """How often this operation ran in this step, on the same line for the same module."""
        line = _line(site, op)
        return max(self._runs.get(line, 0), self._runs_before.get(line, 0))

    def note_entry(self, tensor: Tensor, path: str) -> None:
        """An input of a top-level module; it may have been put together by operations before."""
        made = self._made.get(tensor)
        self.names.put(tensor, path)
        ops, deliveries = (made.ops, made.deliveries) if made else (("",), ())
        self._made.put(tensor, Made(ops, True, deliveries))

    def note_delivery(self, tensor: Tensor, delivery: Delivery) -> None:
        """A loader has handed the tensor over."""
        made = self._made.get(tensor)
        ops, from_batch = (made.ops, made.from_batch) if made else (("",), False)
        self._made.put(tensor, Made(ops, from_batch, (delivery,)))

    def note_result(self, info: OpInfo, args: tuple[Any, ...], out: Any) -> None:
        """Remember the operation behind a value, and those behind its inputs.

        One that a backward pass ran has "grad:" before its name.
        """
        base = info.base if running_node() is None else f"grad:{info.base}"
        ops, from_batch = [base], False
        deliveries: dict[Delivery, None] = {}
        for tensor in tensors_in(args):
            made = self._made.get(tensor)
            if len(ops) < _MOST_OPS:
                ops.append(made.ops[0] if made else "")
            if made is not None:
                from_batch = from_batch or made.from_batch
                if made.deliveries:
                    deliveries.update(dict.fromkeys(made.deliveries))
        made = Made(tuple(ops), from_batch, tuple(deliveries)[:4])
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            if not isinstance(tensor, nn.Parameter):  # an updated weight is still a weight
                self._made.put(tensor, made)

    def made_by(self, tensor: Tensor) -> list[str]:
        made = self._made.get(tensor)
        return list(made.ops) if made else []

    def is_from_batch(self, tensor: Tensor) -> bool:
        """Whether an input of a top-level module went into the value."""
        made = self._made.get(tensor)
        return made is not None and made.from_batch

    def deliveries(self, tensors: Iterable[Tensor]) -> list[Delivery]:
        """The batches of loaders that went into the values."""
        known = (self._made.get(tensor) for tensor in tensors)
        return list(dict.fromkeys(each for made in known if made for each in made.deliveries))

    def note_allocation(self, tensor: Tensor, site: Site) -> None:
        if tensor.is_floating_point() and tensor.numel():
            self._raw.put(tensor, Raw(site, tensor.numel()))

    def note_write(self, tensor: Tensor) -> None:
        raw = self._raw.get(tensor) if self._raw else None  # a look takes time, and there are many
        if raw is None:
            return
        left = raw.left - tensor.numel()
        if left > 0:
            self._raw.put(tensor, Raw(raw.site, left))
        else:
            self._raw.drop(tensor)

    def site_of_unwritten(self, tensor: Tensor) -> Site | None:
        """Where the memory was allocated, if some of it was never written."""
        raw = self._raw.get(tensor)
        return raw.site if raw is not None else None


def _line(site: Site, op: str) -> Line:
    return site.innermost, op, id(site.modules[-1]) if site.modules else 0


Known = TypeVar("Known")


class StorageMap(Generic[Known]):
    """A value per living storage.

    The weak reference keeps the address of a storage that is gone from being used again, so
    whoever has the address of an entry is its storage.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, Known]] = {}
        self._most = _FEWEST

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tensor: Tensor) -> Known | None:
        entries = self._entries
        entry = entries.get(_key(tensor)) if entries else None
        return None if entry is None else entry[1]

    def put(self, tensor: Tensor, known: Known) -> None:
        memory = _memory(tensor)
        if memory is not None:
            if len(self._entries) >= self._most:
                self._let_go()
            self._entries[memory._cdata] = StorageWeakRef(memory), known

    def _let_go(self) -> None:
        """Forget what is gone: what is left of it cuts the process's memory into small pieces."""
        self._entries = {k: e for k, e in self._entries.items() if not e[0].expired()}
        self._most = max(_FEWEST, 2 * len(self._entries))

    def drop(self, tensor: Tensor) -> None:
        self._entries.pop(_key(tensor), None)


_FEWEST = 256


def covers_storage(tensor: Tensor) -> bool:
    """Whether the tensor is the whole of its memory."""
    try:
        return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return False


def is_same_memory(one: Tensor, two: Tensor) -> bool:
    """Whether both are in the same storage."""
    key = _key(one)
    return key != _NOTHING and key == _key(two)


_NOTHING = 0


def _key(tensor: Tensor) -> int:
    """The address of its storage; 0 if it has none."""
    try:
        key: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        memory = _memory(tensor)
        return _NOTHING if memory is None else memory._cdata
    return key


def _memory(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of a sparse one the values have; wrappers: none
        return tensor._values().untyped_storage() if tensor.layout is torch.sparse_coo else None


class BufferPlaces:
    """Where modules were given buffers that were bad from the beginning."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], tuple[weakref.ref[nn.Module], Site]] = {}

    def note(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        """The module is given this buffer now; one on a device is not waited for."""
        if buffer is None or not buffer.is_cpu or not is_bad(buffer):
            return
        place, inner = own_place(sys._getframe(1))
        if place is not None:
            self._places[id(module), name] = weakref.ref(module), Site(place, inner=inner)

    def of(self, module: nn.Module, name: str) -> Site | None:
        """Where it was given the buffer, if that was bad already."""
        owner, site = self._places.get((id(module), name), (None, None))
        return site if owner is not None and owner() is module else None


class Arrivals:
    """Tells values of a step's graph and gradients of parameters from what came in as data.

    Native code, a hook below the dispatcher or a flipped bit may change them; an operation
    that is traced would have been seen.
    """

    def __init__(self, nodes: NodeSites) -> None:
        self._nodes = nodes
        self._roots: WeakSet[nn.Module] = WeakSet()

    def note_root(self, root: nn.Module) -> None:
        """A top-level module is called: its parameters have gradients that may arrive."""
        self._roots.add(root)

    def of(self, tensor: Tensor) -> tuple[Phase, Site] | None:
        """In which pass the value was computed, and where; None for what may be data."""
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:
            return None
        if tensor.grad_fn is not None:
            site = self._nodes.get(tensor.grad_fn)
            return None if site is None else ("forward", site)
        # What is first met in a backward pass is a gradient: bad data were met in the forward.
        node = running_node()
        variable = getattr(node, "variable", None)  # of AccumulateGrad
        if variable is not None:
            return "backward", self._owner(lambda param: param is variable) or Site(None)
        address = tensor.data_ptr()
        site = (None if node is None else self._nodes.get(node)) or self._owner(
            lambda param: param.grad is not None and _address(param.grad) == address
        )
        return None if site is None else ("backward", site)

    def _owner(self, is_it: Any) -> Site | None:
        """The module whose own parameter it is, as a site without a line."""
        for root in list(self._roots):
            for module in root.modules():
                if any(is_it(param) for param in module.parameters(recurse=False)):
                    return Site(None, (root, module) if module is not root else (root,))
        return None


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


# From an autograd node back to the forward operation that made it.
#
# A node takes its number just before its operation reaches the dispatcher, so the
# operation that sees a new number is the one that made the node. This needs no
# anomaly mode and no formatted stacks.

_KEEP = 400_000
_UNNUMBERED = 2**63  # AccumulateGrad has the largest number there is


class NodeSites:
    """Where each autograd node was made, by its sequence number."""

    def __init__(self) -> None:
        self._sites: dict[int, Site] = {}
        self._next = _number()
        self._fresh = False
        self.newest = range(0)
        """The numbers of the nodes that were made last."""
        self._recent: deque[Any] = deque(maxlen=256)

    def is_new(self) -> bool:
        """Whether the operation that runs now has made a node."""
        node = running_node()
        if node is not None and not (self._recent and self._recent[-1] is node):
            self._recent.append(node)
        elif node is None and self._recent:
            self._recent.clear()  # do not keep a finished graph alive
        self._fresh = _number() > self._next
        return self._fresh

    def latest_is_fresh(self) -> bool:
        return self._fresh

    def put(self, site: Site) -> None:
        number = _number()
        self.newest = range(max(self._next, number - 4), number)
        for made in self.newest:
            self._sites[made] = site
        self._next = number
        if len(self._sites) > _KEEP:
            for old in list(self._sites)[: _KEEP // 2]:
                del self._sites[old]

    def get(self, node: Any) -> Site | None:
        number = node._sequence_nr()
        return self._sites.get(number) if number < _UNNUMBERED else None

    def consumers(self) -> list[str]:
        """Names of the nodes whose gradient came to the one running now, the nearest first."""
        near = [node] if (node := running_node()) is not None else []
        found: list[str] = []
        for _ in range(6):  # so far away
            near = [
                node
                for node in self._recent
                if any(after is other for after, _ in node.next_functions for other in near)
            ]
            found.extend(node.name() for node in near if node.name() not in found)
        return found

    @staticmethod
    def is_recomputation(frame: FrameType | None) -> bool:
        """Whether activation checkpointing is running the forward again inside a backward."""
        while frame is not None and kind_of(frame.f_code) != ENGINE:
            if frame.f_code.co_filename == checkpoint.__file__:
                return True
            frame = frame.f_back
        return False
