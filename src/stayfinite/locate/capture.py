"""What bad operations were given, kept so that one of them can be run alone."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stayfinite.detect.summary import summarize
from stayfinite.detect.veto import STEP_FAILED
from stayfinite.locate.operators import Call, tensors_in
from stayfinite.locate.provenance import Event, running_node
from stayfinite.records import NaNType
from stayfinite.safely import Safely
from stayfinite.snapshot import RandomState

ONE_CALL = 12 << 20  # bytes of tensors of an operation that are kept; more are only described
_ALL_CALLS = 64 << 20
_FORWARD = 64 << 20
_BEFORE = 64 << 20
_MOST_CALLS = 512
_MOST_OF_A_LINE = 32
_MOST_ENTRIES = 16


@dataclass(frozen=True, kw_only=True)
class KeptCall:
    """An operation by its schema's names, with copies of its tensors on the CPU.

    In place of a tensor that is too large or of a special kind is its summary. `open` names the
    arguments that are parameters or belong to an optimizer: the others may come from data.
    """

    op: str
    arguments: dict[str, Any]
    open: frozenset[str] = frozenset()
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A bad operation; in a backward pass with the operation whose gradient it computes."""

    call: KeptCall
    nan_type: NaNType
    forward: KeptCall | None = None


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """How things stood when the pass through the top-level modules began."""

    random: RandomState
    entries: list[tuple[weakref.ref[nn.Module], Any]] = field(default_factory=list)
    buffers: dict[int, dict[str, Tensor]] = field(default_factory=dict)


class KeptCalls:
    """The inputs of the latest bad operations that a Tracer meets: at most 64 MB of them."""

    def __init__(self) -> None:
        self.beginning: Beginning | None = None
        self._begun_at = -1
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._nbytes = 0
        self._of_line: Counter[Any] = Counter()
        self._forward = _ForwardCalls()
        self._before: dict[int, Tensor] = {}
        self._safely = Safely(STEP_FAILED)

    def of(self, event: Event) -> Kept | None:
        """What the operation of the event was given; None when that was not kept."""
        return self._kept.get(event.order)

    def next_step(self) -> None:
        """The guard's clock has ticked."""
        self._of_line.clear()

    def note_before(self, written: Sequence[Tensor]) -> None:
        """The operation that comes reads these, and then overwrites them."""
        self._before = {}
        with self._safely:
            ours = [tensor for tensor in written if _is_plain(tensor)]
            if sum(tensor.nbytes for tensor in ours) <= _BEFORE:
                self._before = {id(tensor): tensor.detach().clone() for tensor in ours}

    def note_forward(self, numbers: range, call: Call) -> None:
        """The call has made the autograd nodes of these numbers."""
        with self._safely:
            self._forward.put(numbers, call)

    def keep(self, event: Event, call: Call, bad: Tensor) -> None:
        """The call of the event has just given this."""
        with self._safely:
            line = event.op, event.site.innermost, event.clock
            self._of_line[line] += 1
            if self._of_line[line] > _MOST_OF_A_LINE:  # the first is guilty, the others follow it
                return
            is_open = event.phase == "optimizer"
            node = running_node()
            kept = Kept(
                call=_kept_call(call, _for_member(call, bad), is_open=is_open, before=self._before),
                nan_type=event.nan_type,
                forward=self._forward.get(node._sequence_nr()) if node is not None else None,
            )
            self._kept[event.order] = kept
            self._nbytes += _size(kept)
            while self._nbytes > _ALL_CALLS or len(self._kept) > _MOST_CALLS:
                self._nbytes -= _size(self._kept.popitem(last=False)[1])

    def begin(self, module: nn.Module, args: Any, clock: int) -> None:
        """A top-level module is called with these arguments."""
        if self.beginning is None or self._begun_at != clock:
            self._begun_at = clock
            self.beginning = Beginning(random=RandomState.capture())
        entries, buffers = self.beginning.entries, self.beginning.buffers
        if len(entries) >= _MOST_ENTRIES:
            return
        entries.append((weakref.ref(module), args))
        named = dict(module.named_buffers())
        if id(module) not in buffers and sum(b.nbytes for b in named.values()) <= ONE_CALL:
            buffers[id(module)] = {name: b.detach().clone() for name, b in named.items()}


class _ForwardCalls:
    """The calls that made the latest autograd nodes, by reference: up to 64 MB of tensors."""

    def __init__(self) -> None:
        self._calls: OrderedDict[int, tuple[Call, list[tuple[Tensor, int]], int]] = OrderedDict()
        self._nbytes = 0

    def put(self, numbers: range, call: Call) -> None:
        given = tensors_in([*call.args, *call.kwargs.values()])
        size = sum(t.nbytes for t in given if _is_plain(t) and not isinstance(t, nn.Parameter))
        if size > ONE_CALL:
            return
        for number in numbers:
            self._calls[number] = call, [(t, t._version) for t in given], size
            self._nbytes += size
        while self._nbytes > _FORWARD:
            self._nbytes -= self._calls.popitem(last=False)[1][2]

    def get(self, number: int) -> KeptCall | None:
        found = self._calls.get(number)
        if found is None or any(tensor._version != version for tensor, version in found[1]):
            return None
        return _kept_call(found[0], dict(found[0].named()), is_open=False, before={})


def _for_member(call: Call, bad: Tensor) -> dict[str, Any]:
    """The arguments; of an operation on lists of tensors only the members beside the bad one."""
    named = dict(call.named())
    if not call.info.base.startswith(("_foreach_", "_fused_")):
        return named
    lists = [value for value in named.values() if isinstance(value, (list, tuple))]
    places = [n for value in lists for n, member in enumerate(value) if member is bad]
    if not places:
        return named
    length, place = max(map(len, lists)), places[0]
    return {
        name: list(value[place : place + 1])
        if isinstance(value, (list, tuple)) and len(value) == length
        else value
        for name, value in named.items()
    }


def _kept_call(
    call: Call, arguments: dict[str, Any], *, is_open: bool, before: dict[int, Tensor]
) -> KeptCall:
    tensors = [(n, t) for n, value in arguments.items() for t in tensors_in([value])]
    size = sum(tensor.nbytes for _, tensor in tensors if _is_plain(tensor))
    is_small = size <= ONE_CALL
    found = {name: _copy_of(name, v, is_small, before) for name, v in arguments.items()}
    open_ones = {n for n, t in tensors if is_open or is_parameter(t)}
    nbytes = size if is_small else 0
    return KeptCall(op=call.info.name, arguments=found, open=frozenset(open_ones), nbytes=nbytes)


def _copy_of(name: str, value: Any, is_small: bool, before: dict[int, Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_copy_of(f"{name}[{n}]", item, is_small, before) for n, item in enumerate(value)]
    if not isinstance(value, Tensor):
        return value
    value = before.get(id(value), value)
    if not is_small or not _is_plain(value):
        return summarize(name, value)
    return value.detach().to("cpu", copy=True).contiguous()


def _size(kept: Kept) -> int:
    return kept.call.nbytes + (kept.forward.nbytes if kept.forward else 0)


def is_parameter(tensor: Tensor) -> bool:
    """Whether it is a parameter, or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )
