"""The beginning of a step, noted cheaply enough to be noted every time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import call, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from stayfinite.detect.memory import undisturbed
from stayfinite.snapshot.copies import (
    CONSTANTS,
    AttributesCell,
    BoxCell,
    Cell,
    FrozenCell,
    Memories,
    copy_all,
    is_constant,
    is_odd,
    is_simple,
    like,
    memories,
    put_back,
    put_contents_back,
    same,
    size_of,
)
from stayfinite.snapshot.rng import SeldomReadCells, global_cells
from stayfinite.snapshot.walk import (
    Census,
    SnapshotMembers,
    add_attributes,
    add_buffers,
    add_object,
    add_param_groups,
    managed_modules,
    named_modules,
)
from stayfinite.training import params_of


class Mark:
    """Everything but parameters, optimizer state and averages, as a step began."""

    __slots__ = ("_cells", "_contents", "_gradients", "_tensors")

    def __init__(
        self,
        cells: list[Cell],
        contents: list[Any],
        tensors: KeptTensors | None,
        gradients: KeptGradients,
    ) -> None:
        self._cells, self._contents = cells, contents
        self._tensors, self._gradients = tensors, gradients

    def restore(self) -> None:
        put_contents_back([*zip(self._cells, self._contents, strict=True)])
        if self._tensors is not None:
            self._tensors.restore()
        self._gradients.restore()


_STRUCTURE = ("_parameters", "_buffers", "_modules")


class Marker:
    """Makes marks of one training job.

    There are many modules, so these are walked again only when something in them is another
    thing than before, and so are param groups; schedulers and scaler are walked each time.
    What is asked in each step is asked of many objects by one call.
    """

    def __init__(self, members: SnapshotMembers) -> None:
        self._members = members
        self._has_followers = bool(
            members.schedulers or members.generators or members.scaler is not None
        )
        self._random = SeldomReadCells()
        self._rated: list[Tensor] = []
        self._tensors, self._gradients = TensorWatch([]), GradientWatch([])
        self._walk_modules()

    def _walk_modules(self) -> None:
        modules = [module for _, module in named_modules(self._members.models)]
        managed = managed_modules(self._members.models)
        own = [module for module in modules if module not in managed]
        held = [p for module in own for p in module._parameters.values() if p is not None]
        census = Census({id(param) for param in held})
        for module in modules:
            add_buffers(census, module, "", "buffers")
            add_attributes(census, module, "", "attributes", is_managed=module in managed)
        for optimizer in self._members.optimizers:
            add_param_groups(census, optimizer)
        tensors = [item.tensor for item in census.items]
        self._buffers = [t for t in tensors if not isinstance(t, torch.nn.Parameter)]
        self._sort(census.cells)
        self._family = [m._modules for m in modules] + [m._parameters for m in own]
        self._set_values(self._read_attributes())
        self._held = held
        self._set_params()

    def _sort(self, cells: list[Cell]) -> None:
        """Cells by how they are read: attributes of modules, dicts, lists and others."""
        attributes: list[AttributesCell] = []
        dicts: list[BoxCell] = []
        lists: list[BoxCell] = []
        others: list[Cell] = []
        for cell in cells:
            kind = cell.content_type if isinstance(cell, BoxCell) else None
            if isinstance(cell, AttributesCell) and cell.value.keys() >= set(_STRUCTURE):
                attributes.append(cell)
            elif isinstance(cell, BoxCell) and kind in (dict, list):
                (dicts if kind is dict else lists).append(cell)
            else:
                others.append(cell)
        self._boxes: list[Cell] = [*attributes, *dicts, *lists]
        self._attribute_cells, self._others = attributes, others
        self._attributes: list[dict[str, Any]] = [cell.value for cell in attributes]
        self._dicts: list[dict[Any, Any]] = [cell.value for cell in dicts]
        self._lists: list[list[Any]] = [cell.value for cell in lists]

    def _read_attributes(self) -> list[Any]:
        """Learn which attributes modules have now, and give all values; hooks are not state."""
        self._getters = [
            itemgetter(*_STRUCTURE, *(key for key in cell.value if key not in cell.skipped))
            for cell in self._attribute_cells
        ]
        self._sizes = [*map(len, self._attributes)]
        return self._values_now() or []

    def _values_now(self) -> list[Any] | None:
        """All that is in modules, dicts and lists; None if modules have other attributes."""
        if [*map(len, self._attributes)] != self._sizes:
            return None
        try:
            own = [*chain.from_iterable(map(call, self._getters, self._attributes))]
        except KeyError:
            return None
        inside = chain.from_iterable(map(dict.values, chain(self._dicts, self._family)))
        return [*own, *inside, *chain.from_iterable(self._lists)]

    def _look_for_change(self) -> None:
        """Walk again if there is anything new to walk into; else keep the new constants."""
        values = self._values_now()
        if values is not None and same(values, self._values):
            return
        now = self._read_attributes() if values is None else values
        if _hold_same_things(now, self._values):
            self._set_values(now)
        else:
            self._walk_modules()

    def _set_values(self, values: list[Any]) -> None:
        self._values = values
        # Those of modules are copied only when one has changed: there are many of them.
        self._attribute_contents = [*map(dict, self._attributes)]

    def _set_params(self) -> None:
        params = list({id(param): param for param in [*self._held, *self._rated]}.values())
        self._frozen = FrozenCell(params, "requires_grad", "attributes")
        if not same(params, self._gradients.params):
            self._gradients = GradientWatch(params)

    def mark(self, *, exact: bool) -> Mark:
        """All of it as it is now; unless `exact`, generators that nobody seems to use excepted."""
        self._look_for_change()
        rated = [param for optimizer in self._members.optimizers for param in params_of(optimizer)]
        if not same(rated, self._rated):
            self._rated = rated
            self._set_params()
        random = global_cells() if exact else self._random.cells()
        cells, tensors = [*self._others, self._frozen, *random], self._buffers
        if self._has_followers:
            found = self._followers()
            cells += found.cells
            tensors = tensors + [item.tensor for item in found.items]
        if not same(tensors, self._tensors.tensors):
            self._tensors = TensorWatch(tensors, self._tensors)
        contents = [*self._attribute_contents, *map(dict, self._dicts), *map(list, self._lists)]
        contents += [cell.content() for cell in cells]
        kept = self._tensors.keep(), self._gradients.keep()
        return Mark([*self._boxes, *cells], contents, *kept)

    def _followers(self) -> Census:
        """Schedulers, scaler and generators."""
        census = Census()
        for owner in self._members.schedulers:
            add_object(census, owner, "scheduler", "scheduler")
        if self._members.scaler is not None:
            add_object(census, self._members.scaler, "scaler", "scaler")
        for generator in self._members.generators:
            census.value(generator, "random.generator", "random")
        return census


def _hold_same_things(new: list[Any], old: list[Any]) -> bool:
    """Whether all that may have to be walked into is the same; constants may become others."""
    one, two = ([v for v in values if type(v) not in CONSTANTS] for values in (new, old))
    return len(one) == len(two) and all(
        n is o or (is_constant(n) and is_constant(o)) for n, o in zip(one, two, strict=True)
    )


SMALL = 1 << 16
"""Tensors of up to so many bytes are copied in each step without asking."""
_LEARNING = 3
_LOOK_AGAIN = 64


class TensorWatch:
    """Copies small tensors in each step, and large ones only when they have changed."""

    def __init__(self, tensors: Sequence[Tensor], before: TensorWatch | None = None) -> None:
        self.tensors = tensors
        unique = {id(tensor): tensor for tensor in tensors}.values()
        values = [tensor for tensor in unique if memories(tensor)]
        known = {id(single.tensor): single for single in before._single} if before else {}
        is_late = before is not None and bool(before.tensors)
        small = [t for t in values if size_of(t) <= SMALL and is_simple(t) and not is_odd(t)]
        others = set(map(id, values)) - set(map(id, small))
        self._small = _SmallTensors(small)
        self._single: list[_SingleTensor] = [
            known.get(id(tensor)) or _SingleTensor(tensor, is_late=is_late)
            for tensor in values
            if id(tensor) in others
        ]
        self._is_empty = not values

    def keep(self) -> KeptTensors | None:
        """Their values now; None when there is nothing to keep."""
        return None if self._is_empty else self._keep()

    @undisturbed
    def _keep(self) -> KeptTensors:
        return KeptTensors(self._small.keep(), [single.keep() for single in self._single])


class KeptTensors:
    """Values of tensors at one moment."""

    def __init__(self, small: list[_KeptGroup], single: list[_KeptSingle]) -> None:
        self._small, self._single = small, single

    def restore(self) -> None:
        for tensors, kinds, values in self._small:
            parts = values.split([shape.numel() * dtype.itemsize for shape, dtype in kinds])
            pairs = zip(parts, kinds, strict=True)
            put_back(tensors, [[part.view(dtype).view(shape)] for part, (shape, dtype) in pairs])
        changed = [(t, kept) for t, kept, version in self._single if kept and version != t._version]
        put_back([tensor for tensor, _ in changed], [kept for _, kept in changed])


_KeptGroup = tuple[list[Tensor], list[tuple[torch.Size, torch.dtype]], Tensor]
"""Tensors, their shapes and dtypes, and the bytes of their values one after the other."""


class _SmallTensors:
    """Ordinary tensors, of which those of one device are copied by one call, as bytes."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._arrange()

    def _arrange(self) -> None:
        groups: dict[object, list[Tensor]] = {}
        # Those with the larger elements first, so that each begins where its dtype may.
        for tensor in sorted(self._tensors, key=Tensor.element_size, reverse=True):
            groups.setdefault(tensor.device, []).append(tensor)
        self._groups = [
            (
                group,
                [(tensor.shape, tensor.dtype) for tensor in group],
                [tensor.detach().view(-1).view(torch.uint8) for tensor in group],
            )
            for group in groups.values()
        ]
        self._places = self._places_now()

    def _places_now(self) -> list[int]:
        """Where their memory is: `tensor.data = ...` gives them another, and so may resize_()."""
        return [*map(Tensor.data_ptr, self._tensors), *map(Tensor.numel, self._tensors)]

    def keep(self) -> list[_KeptGroup]:
        if self._places_now() != self._places:
            self._arrange()
        return [(group, kinds, torch.cat(flat)) for group, kinds, flat in self._groups]


_KeptSingle = tuple[Tensor, Memories, int]
"""A tensor, its value, and the version that needs no restoring."""
_ALWAYS = -1


class _SingleTensor:
    """A tensor that is copied by itself, if it is large only after a look: most never change.

    torch counts writes to a tensor, but not those through `.data` or by batch norm. So the first
    steps, and then some, compare bytes: who was caught once is copied each time. One that is
    new since the last step has replaced another, and will be replaced rather than written to:
    it is copied only if it is still there a step later.
    """

    def __init__(self, tensor: Tensor, *, is_late: bool) -> None:
        self.tensor = tensor
        is_small = size_of(tensor) <= SMALL
        self._is_late = is_late and not is_small
        self._kept: Memories = []
        self._version = -1
        self._looks = 0
        self._writes_silently = is_small  # or may; it is not worth a look

    def keep(self) -> _KeptSingle:
        version = self.tensor._version  # torch's own count; there is no public name for it
        if self._is_late:
            self._is_late = False
            return self.tensor, [], version
        self._looks += 1
        now = memories(self.tensor)
        if version == self._version and not self._writes_silently:
            if self._looks > _LEARNING and self._looks % _LOOK_AGAIN:
                return self.tensor, self._kept, version
            if all(map(_same_bytes, now, self._kept)):  # host sync
                return self.tensor, self._kept, _ALWAYS
            self._writes_silently = True
        # Older marks may hold the old value, so this is new memory.
        self._kept = [like(memory) for memory in now]
        copy_all(zip(self._kept, now, strict=True))
        self._version = version
        return self.tensor, self._kept, _ALWAYS


def _same_bytes(one: Tensor, two: Tensor) -> bool:
    if one.is_contiguous() and two.is_contiguous():
        one, two = one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8)
    return torch.equal(one, two)


class GradientWatch:
    """Keeps leftover gradients by reference, and copies them only if steps write into them.

    Most loops drop them (`zero_grad()`), so that the reference is all that is needed; loops that
    accumulate into them or zero them in place are noticed in the first steps, which copy.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = params
        self._looks = 0
        self._are_written = False
        self._last: list[tuple[Tensor, Tensor, int]] = []  # with the gradient and its version
        self._none = KeptGradients(params, [None] * len(params))

    def keep(self) -> KeptGradients:
        gradients = [param.grad for param in self.params]
        for param, grad, version in self._last:
            self._are_written |= param.grad is grad and grad._version != version
        self._last = []
        if all(map(is_, gradients, repeat(None))):
            return self._none
        self._looks += 1
        is_learning = self._looks <= _LEARNING
        if is_learning:
            pairs = zip(self.params, gradients, strict=True)
            self._last = [(p, grad, grad._version) for p, grad in pairs if grad is not None]
            self._are_written |= _share_memory(gradients)
        kept = KeptGradients(self.params, gradients)
        if is_learning or self._are_written:
            kept.copy()
        return kept


def _share_memory(gradients: Iterable[Tensor | None]) -> bool:
    """Whether they are parts of a larger memory, which others may write to (DDP's buckets)."""
    return any(
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.untyped_storage().nbytes() > gradient.nbytes
        for gradient in gradients
    )


class KeptGradients:
    """The gradients of one moment."""

    def __init__(self, params: Sequence[Tensor], gradients: list[Tensor | None]) -> None:
        self._params, self._gradients = params, gradients
        self._values: list[tuple[Tensor, Memories]] = []

    @torch.no_grad()
    def copy(self) -> None:
        for gradient in self._gradients:
            if gradient is not None:
                now = memories(gradient)
                self._values.append((gradient, [like(memory) for memory in now]))
                copy_all(zip(self._values[-1][1], now, strict=True))

    def restore(self) -> None:
        for param, gradient in zip(self._params, self._gradients, strict=True):
            if param.grad is not gradient:
                param.grad = gradient
        put_back([gradient for gradient, _ in self._values], [kept for _, kept in self._values])
