"""The beginning of a step, noted cheaply enough to be noted every time."""

from __future__ import annotations

import torch
from torch import Tensor

from stayfinite.detect.gradients import params_of
from stayfinite.snapshot.cells import Cell, FrozenCell, ProtocolCell
from stayfinite.snapshot.census import Census
from stayfinite.snapshot.form import same
from stayfinite.snapshot.leftover import GradientWatch, KeptGradients
from stayfinite.snapshot.members import Members
from stayfinite.snapshot.modules import Family, ModulesWatch
from stayfinite.snapshot.owners import add_object, add_param_groups, named_modules
from stayfinite.snapshot.rng import device_cells, host_cells
from stayfinite.snapshot.tensors import KeptTensors, TensorWatch
from stayfinite.snapshot.watch import Contents, Watch


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
        self._rated = self._rated_now()
        held: list[Tensor] = [p for m in modules for p in m._parameters.values() if p is not None]
        params = list({id(param): param for param in [*held, *self._rated]}.values())
        self._family = Family(modules)
        self._modules = _Watched(ModulesWatch(modules, {id(param) for param in params}))
        self._followers = _Watched(Watch(self._follower_census))
        self._gradients = GradientWatch(params)
        self._cells: list[Cell] = [FrozenCell(params, "requires_grad", "attributes")]
        self._cells += self._generators()
        self._reads = [cell.content for cell in self._cells]

    def _rated_now(self) -> list[Tensor]:
        """The parameters that have learning rates."""
        return [param for optimizer in self._members.optimizers for param in params_of(optimizer)]

    def _follower_census(self) -> Census:
        """Param groups, schedulers and scaler."""
        census = Census()
        for optimizer in self._members.optimizers:
            add_param_groups(census, optimizer)
        for owner in self._members.schedulers:
            add_object(census, owner, "scheduler", "scheduler")
        if self._members.scaler is not None:
            add_object(census, self._members.scaler, "scaler", "scaler")
        return census

    def _generators(self) -> list[Cell]:
        census = Census()
        census.cells += [*host_cells(), *device_cells()]
        for generator in self._members.generators:
            census.value(generator, "random.generator", "random")
        self._is_cuda_awake = torch.cuda.is_initialized()
        return census.cells

    def mark(self) -> Mark:
        modules, followers = self._modules.keep(), self._followers.keep()
        if self._has_news() and not self._knows_all():
            self._look()
            modules, followers = self._modules.keep(), self._followers.keep()
        others = self._cells, [read() for read in self._reads]
        contents, tensors = [modules[0], followers[0], others], [modules[1], followers[1]]
        return Mark(contents, tensors, self._gradients.keep())

    def _has_news(self) -> bool:
        is_same_device = torch.cuda.is_initialized() is self._is_cuda_awake
        return self._modules.is_new or self._followers.is_new or not is_same_device

    def _knows_all(self) -> bool:
        """Whether devices, modules and parameters are those it found."""
        is_same_device = torch.cuda.is_initialized() is self._is_cuda_awake
        is_known = is_same_device and self._family.is_whole()
        return is_known and same(self._rated_now(), self._rated)


class _Watched:
    """A watch, and the tensors that it knows."""

    def __init__(self, watch: Watch | ModulesWatch) -> None:
        self._watch = watch
        self._tensors = TensorWatch(watch.tensors)
        self.is_new = False
        """Whether there was something new when it last looked."""

    def keep(self) -> tuple[Contents, KeptTensors | None]:
        contents, self.is_new = self._watch.contents()
        if self.is_new:
            self._tensors = TensorWatch(self._watch.tensors, self._tensors)
        return contents, self._tensors.keep()
