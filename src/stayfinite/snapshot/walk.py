"""Everything that changes in a training job, found by walking its members; each thing once."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from stayfinite.detect.memory import local
from stayfinite.errors import InputError
from stayfinite.snapshot.copies import (
    CONSTANTS,
    ArrayCell,
    AttributesCell,
    BoxCell,
    Cell,
    FrozenCell,
    GradientsCell,
    Kind,
    ProtocolCell,
    is_state,
    items_of,
    kind_of,
    place_of,
)
from stayfinite.snapshot.rng import generator_cell, global_cells
from stayfinite.training import params_of


@dataclass(frozen=True, kw_only=True)
class SnapshotMembers:
    """The members of one training job."""

    models: tuple[nn.Module, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    averages: tuple[Any, ...] = ()
    loader: Any = None
    generators: tuple[Any, ...] = ()

    def census(self) -> Census:
        """All that can change in them now. The order of the parts decides who owns what."""
        census = Census()
        add_modules(census, self.models)
        names = add_loose_parameters(census, self.optimizers)
        add_gradients(census, ((name, param) for param, name in names.items()))
        for optimizer in self.optimizers:
            add_optimizer(census, optimizer, names)
        for name, owner in _numbered("scheduler", self.schedulers):
            add_object(census, owner, name, "scheduler")
        if self.scaler is not None:
            add_object(census, self.scaler, "scaler", "scaler")
        for name, owner in _numbered("ema", self.averages):
            add_object(census, owner, name, "ema")
        census.cells += global_cells()
        for name, generator in _numbered("random.generator", self.generators):
            census.value(generator, name, "random")
        if self.loader is not None:
            add_loader(census, self.loader)
        return census


def _numbered(name: str, owners: tuple[Any, ...]) -> Iterable[tuple[str, Any]]:
    if len(owners) == 1:
        return [(name, owners[0])]
    return [(f"{name}.{number}", owner) for number, owner in enumerate(owners)]


def members_of(
    model: Any, optimizer: Any, scheduler: Any, scaler: Any, ema: Any, loader: Any, generators: Any
) -> SnapshotMembers:
    """Members from what people pass: one of a kind, a sequence, or None."""
    is_one_average = isinstance(ema, (list, tuple)) and any(isinstance(t, Tensor) for t in ema)
    return SnapshotMembers(
        models=_several(model, nn.Module, "model"),
        optimizers=_several(optimizer, Optimizer, "optimizer"),
        schedulers=_several(scheduler, object, "scheduler"),
        scaler=scaler,
        averages=_several([ema] if is_one_average else ema, object, "ema"),
        loader=loader,
        generators=_several(generators, object, "generators"),
    )


def _several(value: Any, kind: type, name: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    members = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    wrong = [type(member).__name__ for member in members if not isinstance(member, kind)]
    if wrong:
        raise InputError(
            f"{name} is a {wrong[0]}; it must be a {kind.__name__} or a sequence of them."
        )
    return members


Enter = Callable[["Census", Any, str, str], None] | None
"""Looks into objects that are not plain state; without it they are left alone."""

PARTS = (
    *("parameters", "buffers", "attributes", "gradients", "optimizer", "param_groups"),
    *("scheduler", "scaler", "ema", "random", "loader"),
)
"""What the state of training is made of; the first part that reaches a thing owns it."""
WEIGHTS = ("parameters", "buffers")


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor that belongs to training; of a DTensor, the `owner`, it is this rank's shard."""

    tensor: Tensor
    name: str
    part: str
    owner: Tensor


class Census:
    """Tensors and cells, in the order in which they were found.

    Objects whose id is in `owned` belong to someone else.
    """

    def __init__(self, owned: Container[int] = ()) -> None:
        self.items: list[Item] = []
        self.cells: list[Cell] = []
        self._owned = owned
        self._names: set[str] = set()
        self._seen: dict[int, Any] = {}  # holds what it saw, so that no id is used again

    def is_new(self, value: Any) -> bool:
        """True once for each object."""
        key = id(value)
        if key in self._seen or key in self._owned:
            return False
        self._seen[key] = value
        return True

    def tensor(self, tensor: Tensor, name: str, part: str) -> None:
        if self.is_new(tensor):
            if name in self._names:  # memory is found by name, so no two may share one
                name = f"{name} ({len(self.items)})"
            self._names.add(name)
            self.items.append(Item(local(tensor), name, part, tensor))

    def value(self, value: Any, name: str, part: str, enter: Enter = None) -> None:
        """Plain state of any kind."""
        kind = kind_of(value)
        if kind is Kind.CONSTANT or (kind is Kind.TUPLE and CONSTANTS.issuperset(map(type, value))):
            return
        if kind is Kind.OTHER:
            if enter is not None:
                enter(self, value, name, part)
        elif kind is Kind.TENSOR:
            self.tensor(value, name, part)
        elif self.is_new(value):
            if kind is Kind.RECORD:
                self.attributes(value, name, part, enter=enter)
            elif kind is Kind.GENERATOR:
                self.cells.append(generator_cell(value, name, part))
            elif kind is Kind.ARRAY:
                self.cells.append(ArrayCell(value, name, part))
            else:
                if kind is Kind.BOX and is_state(value):
                    self.cells.append(BoxCell(value, name, part))
                for key, item in items_of(value):
                    if type(item) not in CONSTANTS:
                        self.value(item, f"{name}.{key}", part, enter)

    def attributes(
        self,
        owner: Any,
        name: str,
        part: str,
        *,
        skipped: Container[str] = (),
        enter: Enter = None,
    ) -> None:
        """The plain attributes of an object, and what is inside them."""
        self.cells.append(AttributesCell(owner, name, part, skipped))
        for key, value in list(vars(owner).items()):
            if type(value) not in CONSTANTS and key not in skipped:
                self.value(value, f"{name}.{key}", part, enter)


# Hooks and children are not state; parameters and buffers are walked on their own.
_MODULE_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
_WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.")
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType)


def add_modules(
    census: Census, roots: Sequence[nn.Module], *, prefix: str = "", part: str | None = None
) -> None:
    """Parameters, buffers, plain attributes; all as one `part`, or each as its own."""
    named = [(name, m) for name, m in named_modules(roots) if census.is_new(m)]
    managed = managed_modules(roots)
    own = [(name, module) for name, module in named if module not in managed]
    params = [(f"{name}{key}", p) for name, m in own for key, p in _held(m._parameters)]
    for name, param in params:
        census.tensor(param, f"{prefix}parameters.{name}", part or "parameters")
    for name, module in own:
        census.cells.append(
            BoxCell(module._parameters, f"{prefix}parameters.{name}", part or "parameters")
        )
    for name, module in named:
        add_buffers(census, module, f"{prefix}buffers.{name}", part or "buffers")
        add_attributes(
            census,
            module,
            f"{prefix}attributes.{name}",
            part or "attributes",
            is_managed=module in managed,
        )
    unique = list({id(param): param for _, param in params}.values())
    frozen = FrozenCell(unique, f"{prefix}requires_grad", part or "attributes")
    census.cells.append(frozen)


def named_modules(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, named "layer.norm." with its dot; several roots are numbered."""
    seen: set[nn.Module] = set()
    for number, root in enumerate(roots):
        above = f"{number}." if len(roots) > 1 else ""
        for name, module in root.named_modules(memo=seen):
            yield above + (f"{name}." if name else ""), module


def managed_modules(roots: Iterable[nn.Module]) -> set[nn.Module]:
    """The modules whose parameters FSDP exchanges: whole ones in a pass, shards between passes.

    What they hold just now is not what is trained, and its memory is freed again: the optimizer's
    parameters are.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return set()
    return {
        module
        for root in roots
        for wrapper in root.modules()
        if any(kind.__name__ in _SHARDERS for kind in type(wrapper).__mro__)
        for module in wrapper.modules()
    }


_SHARDERS = ("FSDPModule", "FullyShardedDataParallel")


def _held(tensors: Mapping[str, Tensor | None]) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def add_buffers(census: Census, module: nn.Module, name: str, part: str) -> None:
    census.cells.append(BoxCell(module._buffers, name, part))
    for key, buffer in _held(module._buffers):
        census.tensor(buffer, f"{name}{key}", part)


def add_attributes(
    census: Census, module: nn.Module, name: str, part: str, *, is_managed: bool = False
) -> None:
    # fully_shard() puts a class of its own before the user's.
    kinds = [kind for kind in type(module).__mro__ if "_fully_shard" not in kind.__module__]
    is_wrapper = kinds[0].__module__.startswith(_WRAPPERS)
    machinery: Container[str] = _AllButTraining() if is_wrapper else _MODULE_MACHINERY
    if is_managed and not is_wrapper:  # FSDP1 has views of whole parameters there
        tensors = {key for key, value in vars(module).items() if isinstance(value, Tensor)}
        machinery = tensors | _MODULE_MACHINERY
    census.attributes(module, name.removesuffix("."), part, skipped=machinery)


class _OptimizerMachinery:
    """Hooks are not state; state and groups are walked on their own."""

    def __contains__(self, key: object) -> bool:
        return key in ("state", "param_groups") or str(key).startswith("_optimizer_")


class _AllButTraining:
    """Wrappers such as DDP hold nothing of the user's."""

    def __contains__(self, key: object) -> bool:
        return key != "training"


def add_loose_parameters(census: Census, optimizers: Sequence[Optimizer]) -> dict[Tensor, str]:
    """Parameters of the optimizers that no module holds; the names of all that are known."""
    for number, optimizer in enumerate(optimizers):
        for place, param in enumerate(params_of(optimizer)):
            census.tensor(param, f"parameters.optimizer{number}.{place}", "parameters")
    items = [item for item in census.items if item.part == "parameters"]
    return {item.owner: item.name.removeprefix("parameters.") for item in items}


def add_gradients(census: Census, named: Iterable[tuple[str, Tensor]]) -> None:
    params = {id(param): (name, param) for name, param in named}.values()
    census.cells.append(GradientsCell(dict(params), "gradients"))


def add_optimizer(census: Census, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
    """Its state, its groups with all hyperparameters, and plain attributes."""

    def enter(census: Census, value: Any, name: str, part: str) -> None:
        # Optimizers around another one, such as SAM and Lookahead, hold it as an attribute.
        if isinstance(value, Optimizer) and census.is_new(value):
            add_optimizer(census, value, names)

    add_param_groups(census, optimizer)
    census.cells.append(BoxCell(optimizer.state, "optimizer.state", "optimizer"))
    for key, state in optimizer.state.items():
        name = names.get(key, "parameter") if isinstance(key, Tensor) else str(key)
        census.value(state, f"optimizer.{name}", "optimizer")
    census.is_new(optimizer)
    census.attributes(
        optimizer, "optimizer", "optimizer", skipped=_OptimizerMachinery(), enter=enter
    )


def add_param_groups(census: Census, optimizer: Optimizer) -> None:
    """All hyperparameters; the parameters in the groups belong to the first part."""
    groups = optimizer.param_groups
    census.cells.append(BoxCell(groups, "param_groups", "param_groups"))
    for number, group in enumerate(groups):
        name = f"param_groups.{number}"
        census.cells.append(BoxCell(group, name, "param_groups"))
        for key, value in group.items():
            if key == "params":
                census.cells.append(BoxCell(value, f"{name}.params", "param_groups"))
            elif type(value) not in CONSTANTS:
                census.value(value, f"{name}.{key}", "param_groups")


def add_object(census: Census, owner: Any, name: str, part: str) -> None:
    """A scheduler, scaler or average of any make: its attributes, and what it says itself."""
    if isinstance(owner, nn.Module):
        add_modules(census, [owner], prefix=f"{name}.", part=part)
    elif isinstance(owner, (dict, list, tuple)):
        census.value(owner, name, part, _enter_member)
    elif census.is_new(owner):
        if hasattr(owner, "__dict__"):
            census.attributes(owner, name, part, enter=_enter_member)
        if _needs_protocol(census, owner, part):
            census.cells.append(ProtocolCell(owner, name, part))


def _enter_member(census: Census, value: Any, name: str, part: str) -> None:
    if part == "ema" and isinstance(value, nn.Module):
        add_modules(census, [value], prefix=f"{name}.", part=part)
    elif isinstance(value, (*_CODE, nn.Module, Optimizer)) or not hasattr(value, "__dict__"):
        return
    elif isinstance(value, LRScheduler) or gives_its_state(value) or callable(value):
        add_object(census, value, name, part)


def gives_its_state(owner: Any) -> bool:
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def _needs_protocol(census: Census, owner: Any, part: str) -> bool:
    """Whether walking the attributes may have missed something.

    torch's own classes are fully walked. An average is large, so it is not kept twice.
    """
    if isinstance(owner, (LRScheduler, GradScaler)) or not gives_its_state(owner):
        return False
    if part != "ema" or not hasattr(owner, "__dict__"):
        return True
    found = {place_of(item.tensor) for item in census.items}
    tensors = [leaf for leaf in tree_leaves(owner.state_dict()) if isinstance(leaf, Tensor)]
    return any(place_of(tensor) not in found for tensor in tensors)


def add_loader(census: Census, loader: Any) -> None:
    """Its position, where it can tell it; else its sampler's, and their own generators."""
    if gives_its_state(loader):
        census.cells.append(ProtocolCell(loader, "loader", "loader"))
        return
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    for name, owner in (("sampler", sampler), ("batch_sampler", batches)):
        if gives_its_state(owner) and census.is_new(owner):
            census.cells.append(ProtocolCell(owner, f"loader.{name}", "loader"))
    for name, owner in (("loader", loader), ("loader.sampler", sampler)):
        census.value(getattr(owner, "generator", None), f"{name}.generator", "loader")
