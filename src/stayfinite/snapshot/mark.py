"""The beginning of a step, noted cheaply enough to be noted every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stayfinite.detect.gradients import params_of
from stayfinite.snapshot.cells import Cell, FrozenCell, ProtocolCell
from stayfinite.snapshot.census import Census
from stayfinite.snapshot.leftover import GradientWatch, KeptGradients
from stayfinite.snapshot.members import Members
from stayfinite.snapshot.owners import add_object, add_param_groups, named_modules
from stayfinite.snapshot.rng import device_cells, host_cells
from stayfinite.snapshot.tensors import KeptTensors, TensorWatch
from stayfinite.snapshot.watch import Contents, ModulesWatch, SchedulerWatch, Watch


class Mark:
    """Everything but parameters, optimizer state and averages, as a step began."""

    __slots__ = ("_contents", "_gradients", "_tensors")

    def __init__(
        self,
        contents: list[Contents],
        tensors: list[KeptTensors | None],
        gradients: KeptGradients,
    ) -> None:
        self._contents, self._tensors, self._gradients = contents, tensors, gradients

    def restore(self) -> None:
        pairs = [pair for cells, its in self._contents for pair in zip(cells, its, strict=True)]
        # What an object loads itself may replace tensors, so it comes first.
        for cell, content in sorted(pairs, key=lambda pair: not isinstance(pair[0], ProtocolCell)):
            cell.put_back(content)
        for tensors in self._tensors:
            if tensors is not None:
                tensors.restore()
        self._gradients.restore()


class Marker:
    """Makes marks of one training job."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._look()

    def _look(self) -> None:
        """Find everyone anew: at first, and when modules or parameters came or went."""
        modules = [module for _, module in named_modules(self._members.models)]
        held: list[Tensor] = [p for m in modules for p in m._parameters.values() if p is not None]
        for optimizer in self._members.optimizers:
            held += params_of(optimizer)
        params = list({id(param): param for param in held}.values())
        self._children = [module._modules for module in modules]
        self._count = self._members_now()
        self._watches = [_Watched(ModulesWatch(modules, {id(param) for param in params}))]
        self._watches += [_Watched(watch) for watch in self._others()]
        self._gradients = GradientWatch(params)
        self._cells: list[Cell] = [FrozenCell(params, "requires_grad", "attributes")]
        self._cells += self._generators()

    def _members_now(self) -> int:
        """Changes when modules or parameters come or go."""
        groups = [g for optimizer in self._members.optimizers for g in optimizer.param_groups]
        parameters = sum([len(group["params"]) for group in groups])
        return sum(map(len, self._children)) + (parameters << 32)

    def _others(self) -> Iterator[Watch]:
        """Param groups, schedulers and scaler."""
        for optimizer in self._members.optimizers:
            yield Watch(partial(_census, add_param_groups, optimizer))
        for owner in self._members.schedulers:
            yield SchedulerWatch(partial(_census, add_object, owner, "scheduler", "scheduler"))
        if self._members.scaler is not None:
            yield Watch(partial(_census, add_object, self._members.scaler, "scaler", "scaler"))

    def _generators(self) -> list[Cell]:
        census = Census()
        census.cells += [*host_cells(), *device_cells()]
        for generator in self._members.generators:
            census.value(generator, "random.generator", "random")
        self._is_cuda_awake = torch.cuda.is_initialized()
        return census.cells

    def mark(self) -> Mark:
        is_awake = self._is_cuda_awake or not torch.cuda.is_initialized()
        if self._count != self._members_now() or not is_awake:
            self._look()
        kept = [watched.keep() for watched in self._watches]
        contents = [contents for contents, _ in kept]
        contents.append((self._cells, [cell.content() for cell in self._cells]))
        return Mark(contents, [tensors for _, tensors in kept], self._gradients.keep())


class _Watched:
    """A watch, and the tensors that it knows."""

    def __init__(self, watch: Watch | ModulesWatch) -> None:
        self._watch = watch
        self._tensors = TensorWatch(watch.tensors)

    def keep(self) -> tuple[Contents, KeptTensors | None]:
        contents, is_new = self._watch.contents()
        if is_new:
            self._tensors = TensorWatch(self._watch.tensors, self._tensors)
        return contents, self._tensors.keep()


def _census(add: Callable[..., None], *owner: Any) -> Census:
    census = Census()
    add(census, *owner)
    return census
