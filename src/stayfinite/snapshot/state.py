"""TrainingState: all that one training job has, kept and put back in place.

The last few good moments are kept in a ring, and two moments can be compared byte by byte.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.detect.detector import bad_reports
from stayfinite.detect.finite import all_finite
from stayfinite.detect.memory import undisturbed
from stayfinite.errors import ConfigError, NonFiniteError, SnapshotError
from stayfinite.snapshot.copies import (
    ArrayCell,
    AttributesCell,
    Cell,
    Contents,
    FunctionsCell,
    GradientsCell,
    Offload,
    ProtocolCell,
    TensorCopies,
    is_constant,
    is_simple,
    items_of,
    memories,
    place_of,
    put_contents_back,
    same,
    size_of,
)
from stayfinite.snapshot.mark import Mark, Marker
from stayfinite.snapshot.rng import global_cells
from stayfinite.snapshot.walk import PARTS, Census, Item, add_gradients, add_modules, members_of

_VITAL = ("parameters", "optimizer", "ema")


class TrainingState:
    """All state of one training job: what to keep so that training can go on from there.

    model, optimizer, scheduler and ema are one or a sequence; ema is a module, an object with
    state_dict and load_state_dict, or tensors in a dict or list. The loader's position is kept
    if it, or its sampler, has state_dict and load_state_dict. Of modules, plain attributes are
    kept too: numbers, text, tensors, arrays, generators, and boxes of such.

    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> state = TrainingState(net, torch.optim.Adam(net.parameters()))
    >>> snapshot = state.capture(step=7)
    >>> _ = net.weight.data.zero_()
    >>> state.restore(snapshot)
    >>> bool(net.weight.any())
    True
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        loader: Any = None,
        generators: Any = (),
    ) -> None:
        self.members = members_of(model, optimizer, scheduler, scaler, ema, loader, generators)
        self._marker: Marker | None = None
        items = self.members.census().items
        self._infinite = {item.name for item in items if _may_be_bad(item)}
        self._known = {item.name for item in items}

    def capture(
        self,
        *,
        step: int = 0,
        into: Snapshot | None = None,
        offload: Offload = "none",
        parts: Collection[str] = PARTS,
        careful: bool = True,
    ) -> Snapshot:
        """Everything as it is now, in the memory of `into` where that is given.

        NonFiniteError names the parameter, optimizer state or running statistic that is not
        finite; `into` is then as before. If not `careful`, it may be empty then: large values
        are looked at only as they are copied, which costs far less.
        """
        snapshot = into if into is not None else Snapshot()
        snapshot.write(
            self.members.census(),
            parts=parts,
            offload=offload,
            is_vital=self._is_vital,
            careful=careful,
        )
        snapshot.step = step
        return snapshot

    def _is_vital(self, item: Item) -> bool:
        """Whether it must be finite; buffers only if they were there at first, and finite."""
        if item.part == "buffers":
            return item.name in self._known and item.name not in self._infinite
        return item.part in _VITAL and item.name not in self._infinite

    def bad_buffers(self) -> list[str]:
        """The names of those that were finite when training began and are not any more."""
        items = [item for item in self.members.census().items if item.part == "buffers"]
        vital = [(item.name, item.tensor) for item in items if self._is_vital(item)]
        if _are_finite(tensor for _, tensor in vital):
            return []
        return [name for name, tensor in vital if not all_finite([tensor])]

    def restore(self, snapshot: Snapshot, *, rewind_loader: bool = True) -> None:
        """Put everything back in place; tensors stay the same objects with the same memory.

        A loader goes on from its old position when it is iterated anew; without
        `rewind_loader` it stays where it is. A non-finite snapshot is refused.
        """
        parts = PARTS if rewind_loader else [part for part in PARTS if part != "loader"]
        snapshot.restore(parts=parts)

    def mark(self, *, exact: bool = True) -> Mark:
        """Where a step begins: all but parameters, optimizer state and averages.

        Without `exact`, generators of python and numpy that no step has drawn from so far are not
        read each time. One that is then used for the first time goes on from where it is.
        """
        if self._marker is None:
            self._marker = Marker(self.members)
        return self._marker.mark(exact=exact)

    def go_back(self, mark: Mark) -> None:
        """As if the step had not begun; for steps whose update was not applied."""
        mark.restore()

    def check_restore(self, step_fn: Callable[[], Any], *, parts: Collection[str] = PARTS) -> None:
        """Prove on this very job that a restore is exact; all is as before afterwards.

        Captures, calls `step_fn`, restores, calls it again, and compares bytes. SnapshotError
        names the first item that is not exact. `parts` are those that the capture keeps.
        """
        snapshot = self.capture(parts=parts)
        prove(self.members.census, lambda: self.restore(snapshot), step_fn)


def _may_be_bad(item: Item) -> bool:
    """Whether it holds Inf on purpose, as masks do: not finite before training, nor trained."""
    if item.owner.requires_grad or item.part not in (*_VITAL, "buffers"):
        return False
    return item.part != "optimizer" and not all_finite([item.tensor])


_SMALL = 1 << 22
"""Of up to so many bytes, everything is looked at before the first is written."""
_SMALL_TENSOR = 1 << 14


class Snapshot:
    """A moment of training that can be put back in place, again and again.

    `Snapshot([model])` keeps parameters, buffers (persistent or not), plain attributes,
    gradients, train flags and random states, finite or not; `TrainingState.capture` keeps all.
    Restoring writes into the same tensors, so that whoever holds them sees the old values.
    """

    def __init__(self, modules: Iterable[nn.Module] | None = None, *, step: int = 0) -> None:
        self.step = step
        self.is_whole = False
        self._kept: _KeptItems | None = None
        self._contents: Contents = []
        if modules is not None:
            roots, census = list(modules), Census()
            add_modules(census, roots)
            add_gradients(census, ((name, p) for r in roots for name, p in r.named_parameters()))
            census.cells += global_cells()
            self.write(census)

    @torch.no_grad()
    def write(
        self,
        census: Census,
        *,
        parts: Collection[str] = PARTS,
        offload: Offload = "none",
        is_vital: Callable[[Item], bool] | None = None,
        careful: bool = True,
    ) -> None:
        """Keep everything that the census found now; memory that fits is used again.

        NonFiniteError names the first vital item that is not finite. If `careful`, or where it
        costs little, nothing is changed then. Otherwise values are looked at only as they are
        copied, and what was kept before is lost.
        """
        items, kept = [item for item in census.items if item.part in parts], self._kept
        if kept is None or not kept.is_for(items, offload):
            kept = _KeptItems(items, offload, is_vital, self._kept)
        is_checked = self.is_whole and (careful or kept.copies.nbytes <= _SMALL)
        kept.refuse_nonfinite(kept.vital if is_checked else kept.copies.not_in_runs)
        contents = [(cell, cell.content()) for cell in census.cells if cell.part in parts]
        self.is_whole = False
        if is_checked:
            kept.copies.fill_runs()
        else:
            kept.fill_runs_or_refuse()
        kept.copies.fill_rest()
        self._kept, self._contents, self.is_whole = kept, contents, True

    def restore(self, *, parts: Collection[str] = PARTS) -> None:
        """Put everything back; the snapshot can be used again.

        NonFiniteError when a value in it that must be finite no longer is; nothing is changed
        then.
        """
        if self._kept is None or not self.is_whole:
            raise SnapshotError("nothing was captured in this snapshot, or not to the end.")
        items, copies = self._kept.items, self._kept.copies
        _refuse_nonfinite(
            [(items[n].name, memory) for n in self._kept.vital for memory in copies.memories[n]]
        )
        put_contents_back([pair for pair in self._contents if pair[0].part in parts])
        copies.put_back(number for number, item in enumerate(items) if item.part in parts)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor memory that it holds."""
        gradients = [
            kept[1]
            for cell, content in self._contents
            if isinstance(cell, GradientsCell)
            for kept in content
            if kept is not None
        ]
        copied = 0 if self._kept is None else self._kept.copies.nbytes
        return copied + sum(map(size_of, gradients))


class _KeptItems:
    """The tensors of a snapshot, and the memory for their values.

    Made once, and again when there are other tensors, or one has another form.
    """

    def __init__(
        self,
        items: list[Item],
        offload: Offload,
        is_vital: Callable[[Item], bool] | None,
        before: _KeptItems | None,
    ) -> None:
        self.items, self._offload = items, offload
        self.vital = [n for n, item in enumerate(items) if is_vital is not None and is_vital(item)]
        names = [] if before is None else [item.name for item in before.items]
        old = {} if before is None else dict(zip(names, before.copies.memories, strict=True))
        known = [old.get(item.name, []) for item in items]
        tensors = [item.tensor for item in items]
        self.copies: TensorCopies = TensorCopies(
            tensors, offload=offload, known=known, checked=self.vital
        )

    def is_for(self, items: list[Item], offload: Offload) -> bool:
        return (
            offload == self._offload
            and same([item.tensor for item in items], self.copies.tensors)
            and [item.name for item in items] == [item.name for item in self.items]
            and self.copies.fit()
        )

    def refuse_nonfinite(self, numbers: Iterable[int]) -> None:
        """NonFiniteError if one of these items is not finite now."""
        _refuse_nonfinite([(self.items[n].name, self.items[n].tensor) for n in numbers])

    @undisturbed
    def fill_runs_or_refuse(self) -> None:
        """Copy run by run; NonFiniteError as soon as one is not finite."""
        for run in self.copies.runs:
            run.fill(self.copies.tensors)
            if not all_finite([run.memory]):
                self.refuse_nonfinite(self.vital)


def _refuse_nonfinite(named: list[tuple[str, Tensor]]) -> None:
    if _are_finite(tensor for _, tensor in named):
        return
    reports = bad_reports(named, described=1)
    if reports:
        names = ", ".join(report.location for report in reports[:5])
        raise NonFiniteError(
            f"a snapshot must be finite, but {names} is not; go back to an older one.",
            report=reports[0],
        )


@undisturbed
def _are_finite(tensors: Iterable[Tensor]) -> bool:
    alone: list[Tensor] = []
    small: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        is_small = tensor.numel() <= _SMALL_TENSOR and is_simple(tensor)
        (small.setdefault((tensor.dtype, tensor.device), []) if is_small else alone).append(tensor)
    # Of small ones a call for each costs more than a copy of all; cat would not take scalars.
    joined = [torch._utils._flatten_dense_tensors(group) for group in small.values()]
    return all_finite([*alone, *joined])


class SnapshotRing:
    """The newest `slots` snapshots; a new one is written into the memory of the oldest.

    The newest is never lost. The oldest may be, when a bad value turns up in a large tensor
    while it is already being written over; a ring of one slot looks at everything first.
    """

    def __init__(self, state: TrainingState, *, slots: int = 2) -> None:
        if slots < 1:
            raise ConfigError(f"slots is {slots}; it must be at least 1.")
        self._state, self._slots = state, slots
        self._kept: deque[Snapshot] = deque()
        self._free: list[Snapshot] = []

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, *, step: int) -> Snapshot:
        """A snapshot of now. NonFiniteError when it is not finite; the newest before stays."""
        oldest = self._kept[0] if len(self._kept) == self._slots else None
        into = oldest or (self._free[-1] if self._free else None)
        try:
            snapshot = self._state.capture(step=step, into=into, careful=self._slots == 1)
        except BaseException:
            if oldest is not None and not oldest.is_whole:  # it was refused or interrupted midway
                self._free.append(self._kept.popleft())
            raise
        if oldest is not None:
            self._kept.popleft()
        elif into is not None:
            self._free.pop()
        self._kept.append(snapshot)
        return snapshot

    def keep_at_least(self, slots: int) -> None:
        """Have so many slots from now on."""
        self._slots = max(self._slots, slots)

    def forget_newest(self) -> None:
        """It turned out not to be good; its memory is used again."""
        self._free.append(self._kept.pop())

    def apart(self, *, step: int) -> Snapshot:
        """A snapshot of now that is not in the ring, in the host's memory."""
        return self._state.capture(step=step, offload="cpu")

    def back(self, k: int = 0) -> Snapshot | None:
        """The k-th newest, 0 the newest; None when there are not so many."""
        return self._kept[-1 - k] if 0 <= k < len(self._kept) else None

    def restore(self, k: int = 0, *, rewind_loader: bool = True) -> Snapshot:
        """Go back to the k-th newest; newer ones are forgotten."""
        snapshot = self.back(k)
        if snapshot is None:
            raise SnapshotError(
                f"there is no snapshot {k} back, only {len(self)} are kept; "
                "take them more often, or keep more slots."
            )
        self._state.restore(snapshot, rewind_loader=rewind_loader)
        for _ in range(k):
            self._free.append(self._kept.pop())
        return snapshot


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
    found: Image = {}
    entries = [(item.name, _digest(item.tensor)) for item in census.items]
    if with_identity:
        places = [(id(item.tensor), place_of(item.tensor)) for item in census.items]
        pairs = zip(entries, places, strict=True)
        entries = [(name, [*digest, *place]) for (name, digest), place in pairs]
    for name, value in chain(entries, *map(_entries, census.cells)):
        # Two things may have one name, such as a dict and the object that it belongs to.
        found[name if name not in found else f"{name} ({len(found)})"] = value
    return found


def _entries(cell: Cell) -> Iterator[tuple[str, Any]]:
    content = cell.content()
    if isinstance(cell, (FunctionsCell, ProtocolCell)):  # what they hold has no other entry
        yield cell.name, picture(content, deep=True)
    elif isinstance(cell, ArrayCell):
        yield cell.name, picture(content)
    elif isinstance(cell, GradientsCell):
        for name, kept in zip(cell.names, content, strict=True):
            yield name, None if kept is None else _digest(kept[1])
    else:
        for number, (key, value) in enumerate(items_of(content)):
            if not isinstance(cell, AttributesCell) or cell.is_ours(key, value):
                label = number if isinstance(key, Tensor) else key
                yield f"{cell.name}.{label}".replace("..", "."), picture(value)


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
        if memory.layout is torch.strided:
            parts = [memory.resolve_conj().resolve_neg()]
        elif memory.is_sparse:
            parts = [memory.coalesce().indices(), memory.coalesce().values()]
        else:
            parts = [memory.to_dense()]
        found += [memory.dtype, tuple(memory.shape)]
        for part in parts:
            flat = part.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found.append(hashlib.blake2b(flat.numpy().data, digest_size=16).digest())
    return found
