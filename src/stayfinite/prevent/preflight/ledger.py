"""What is known of every tensor, by its memory: brought forward with each operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from stayfinite.locate.ops import OpInfo, tensors_in
from stayfinite.locate.storages import StorageMap, covers_storage
from stayfinite.prevent.preflight.measuring import chance_of_none, is_zero_or_one
from stayfinite.prevent.preflight.ranges.deriving import derived, joined, leaf, parameter
from stayfinite.prevent.preflight.ranges.operation import Operation
from stayfinite.prevent.preflight.ranges.reach import Reach

Given = dict[int, Reach]  # by the id of the tensor


class Ledger:
    """The Reach of each tensor that is alive.

    What is made before the first step is settled: it does not change any more, and only what it is
    made into later can.
    """

    def __init__(self) -> None:
        self._known: StorageMap[Reach] = StorageMap()
        self._entered: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def reach(self, tensor: Tensor) -> Reach:
        known = self._known.get(tensor)
        base = tensor if tensor._base is None else tensor._base
        is_parameter = base.requires_grad and base.is_leaf
        if known is None or (is_parameter and known.op != "parameter"):
            known = parameter(base) if is_parameter else _leaf(base)
            self._known.put(tensor, known)
        return known

    def enter(self, module: nn.Module) -> None:
        """Parameters and buffers are what they are, whatever filled them; once for each module."""
        if module in self._entered:
            return
        self._entered.add(module)
        for each in module.modules():
            for held in each._parameters.values():
                if held is not None:
                    self._known.put(held, parameter(held))
            for buffer in each._buffers.values():
                if buffer is not None:
                    self._known.put(buffer, leaf(buffer, fed=False))

    def allocated(self, out: Tensor) -> None:
        self._known.put(out, Reach(unwritten=True, op="empty"))

    def made(
        self,
        info: OpInfo,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Tensor,
        given: Given,
        *,
        in_step: bool,
    ) -> Reach:
        """Enter one output of an operation."""
        if name == "copy":
            name, args = "clone", args[1:2]
        operation = _operation(name, args, kwargs, out, given)
        parents = tuple(dict.fromkeys(operation.reaches()))
        reach = derived(operation, parents, out)
        if info.written and not covers_storage(out):
            old = self._known.get(out)
            if old is not None and not old.unwritten:
                reach = joined(old, reach)
        if in_step:
            for parent in parents:
                parent.users.append(reach)
            reach.settled = _is_settled(args, given)
        else:
            reach.made_from, reach.settled = (), True
        if not isinstance(out, nn.Parameter):  # an updated weight is still a weight
            self._known.put(out, reach)
        return reach


def operand(value: Any, given: Given) -> Any:
    """What a check is told of an argument.

    A settled tensor that is used as a whole is a constant: what it is now, it stays.
    """
    if not isinstance(value, Tensor):
        return value
    reach = given[id(value)]
    if reach.settled and not reach.learned and covers_storage(value):
        return leaf(value, fed=False)
    return reach


def count(name: str, args: tuple[Any, ...], out: Tensor, reach: Reach) -> None:
    """Note how likely it is that a sum of a mask is 0, or a selection by one is empty."""
    if name == "sum" and out.numel() == 1 and not reach.learned and is_zero_or_one(args[0]):
        reach.chance = chance_of_none(args[0])
    elif name in ("nonzero", "masked_select"):
        reach.chance = chance_of_none(args[-1])
    elif name == "index":
        masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype is torch.bool]
        if masks:
            reach.chance = chance_of_none(masks[0])


def mark_read(reach: Reach, tensor: Tensor) -> None:
    """The program asks for the value, so it may decide by it."""
    if tensor.dtype is torch.bool:
        for each in reach.ancestors(3):
            each.read = True
    elif reach.chance is not None:
        reach.read = True


def _leaf(base: Tensor) -> Reach:
    return parameter(base) if isinstance(base, nn.Parameter) else leaf(base, fed=True)


def _operation(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, given: Given
) -> Operation:
    largest = max((tensor.numel() for tensor in tensors_in(args)), default=1)
    return Operation(
        name,
        [_swapped(value, given) for value in args],
        {key: _swapped(value, given) for key, value in kwargs.items()},
        out.dtype,
        max(1, largest // max(1, out.numel())),
    )


def _swapped(value: Any, given: Given) -> Any:
    if isinstance(value, Tensor):
        return given[id(value)]
    if isinstance(value, (list, tuple)):
        return [_swapped(item, given) for item in value]
    return value


def _is_settled(args: tuple[Any, ...], given: Given) -> bool:
    """Whether it is made of nothing but whole tensors that were there before the first step."""
    tensors = tensors_in(args)
    return bool(tensors) and all(given[id(t)].settled and covers_storage(t) for t in tensors)
