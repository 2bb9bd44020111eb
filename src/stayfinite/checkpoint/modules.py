"""Who is saved or loaded, where a model keeps its tensors, and loaded values put in place.

If anything fails on the way, everything is put back.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stayfinite.checkpoint.values import ByPart, Held, PlaceKind, named_parts, with_tensors
from stayfinite.detect.memory import is_sharded, local
from stayfinite.errors import InputError
from stayfinite.nested import as_tuple
from stayfinite.training import params_of

if TYPE_CHECKING:
    from stayfinite.checkpoint.checks import Judged
    from stayfinite.checkpoint.values import Contents
    from stayfinite.snapshot import RandomState


@dataclass(frozen=True, kw_only=True)
class Members(ByPart):
    """The members of a training job."""

    models: tuple[nn.Module, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    averages: tuple[Any, ...] = ()


def gather(
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
) -> Members:
    """Members from what people pass; InputError names what is none."""
    members = Members(
        models=_several(model, "model", nn.Module),
        optimizers=_several(optimizer, "optimizer", Optimizer),
        schedulers=_several(scheduler, "scheduler"),
        scaler=next(iter(_several(scaler, "scaler")), None),
        averages=_several(ema, "ema"),
    )
    for member in (*members.models, *members.averages):
        for module in member.modules() if isinstance(member, nn.Module) else ():
            # After a forward pass fully_shard leaves whole parameters in the outermost module.
            if hasattr(type(module), "set_reshard_after_forward"):
                module.reshard()  # type: ignore[operator]
    return members


def _several(value: Any, name: str, kind: type | None = None) -> tuple[Any, ...]:
    """One, several or None, as a tuple; without a kind they must have a state."""
    members = as_tuple(value)
    for member in members:
        if kind is not None and not isinstance(member, kind):
            raise InputError(
                f"{name} is a {type(member).__name__}; it must be a {kind.__name__} or a list "
                "of them."
            )
        if not (hasattr(member, "state_dict") and hasattr(member, "load_state_dict")):
            raise InputError(
                f"{name} is a {type(member).__name__}; it must have state_dict() and "
                "load_state_dict()."
            )
    return members


def parameter_names(optimizer: Optimizer, models: tuple[nn.Module, ...]) -> list[str | None]:
    """The name of each parameter of the optimizer, in its order; None for one of no model."""
    names: dict[int, str] = {}
    for number, model in enumerate(models):
        above = f"{number}." if len(models) > 1 else ""
        for prefix, owner in named_owners(model):
            for name, parameter in owner._parameters.items():
                full = above + canonical_name(join_names(prefix, name))
                names.setdefault(id(parameter), full)
    return [names.get(id(param)) for param in params_of(optimizer)]


def shards_in(members: Members) -> dict[str, Tensor]:
    """The DTensors of models and averages by their names in a checkpoint."""
    modules = (*named_parts("model", members.models), *named_parts("ema", members.averages))
    return {
        f"{part}.{name}": place.tensor
        for part, module in modules
        if isinstance(module, nn.Module)
        for name, place in places(module).items()
        if place.tensor is not None and is_sharded(place.tensor)
    }


_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorPlace:
    """A slot of a module that holds a tensor, or could: then `tensor` is None."""

    name: str
    kind: PlaceKind
    owner: nn.Module
    attribute: str
    tensor: Tensor | None

    @property
    def is_made_anew(self) -> bool:
        """Whether the module surely makes it when it is built, as files of others take for granted.

        So it is for non-persistent buffers, and for indices and masks that are plain attributes.
        """
        if self.kind == "attribute" and self.tensor is not None:
            return not (self.tensor.is_floating_point() or self.tensor.is_complex())
        return self.kind == "non-persistent buffer"

    @property
    def identity(self) -> tuple[Any, ...]:
        """The same for names that are tied to one tensor."""
        found = None if self.tensor is None else identity(self.tensor)
        return found or (id(self.owner), self.attribute)


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors that are the same memory; empty for one without memory."""
    if is_lazy(tensor) or tensor.is_meta or not tensor.numel():
        return ()
    if type(tensor).__torch_function__ is not Tensor.__torch_function__:  # a subclass may refuse
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def named_owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every name it has, without the names of wrappers around modules."""
    while isinstance(model, (DataParallel, DistributedDataParallel)):
        model = model.module
    for name, module in model.named_modules(remove_duplicate=False):
        yield canonical_name(name), module


def canonical_name(name: str) -> str:
    """The name as it is without torch.compile and other wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def places(model: nn.Module) -> dict[str, TensorPlace]:
    """Every tensor of the model by name.

    Plain attributes count unless they were computed with a graph or are recomputed by a hook, like
    the weight of weight_norm.
    """
    found: dict[str, TensorPlace] = {}
    for above, owner in named_owners(model):
        for kind, attribute, tensor in _tensors(owner):
            name = join_names(above, attribute)
            place = TensorPlace(
                name=name, kind=kind, owner=owner, attribute=attribute, tensor=tensor
            )
            found.setdefault(name, place)
    return found


def join_names(above: str, attribute: str) -> str:
    return f"{above}.{attribute}" if above else attribute


def _tensors(owner: nn.Module) -> Iterator[tuple[PlaceKind, str, Tensor]]:
    for name, parameter in owner._parameters.items():
        if parameter is not None:
            yield "parameter", name, parameter
    for name, buffer in owner._buffers.items():
        if buffer is not None:
            yield _buffer_kind(owner, name), name, buffer
    for name, value in vars(owner).items():
        if isinstance(value, Tensor) and not is_derived(owner, name):
            yield "attribute", name, value


def _buffer_kind(owner: nn.Module, name: str) -> PlaceKind:
    # Modules tell in no other way which of their buffers state_dict() leaves out.
    is_left_out = name in owner._non_persistent_buffers_set
    return "non-persistent buffer" if is_left_out else "buffer"


def is_derived(owner: nn.Module, attribute: str) -> bool:
    """Whether the attribute is computed anew at each forward pass."""
    value = vars(owner).get(attribute)
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return True
    hooks = owner._forward_pre_hooks.values()  # weight_norm's hook has the name of what it sets
    return any(getattr(hook, "name", None) == attribute for hook in hooks)


def slot_for(owners: Mapping[str, nn.Module], name: str) -> TensorPlace | None:
    """An empty slot with this name: a buffer or an attribute that is None or has no elements."""
    above, _, attribute = name.rpartition(".")
    owner = owners.get(above)
    if owner is None:
        return None
    is_buffer = attribute in owner._buffers
    is_class_tensor = isinstance(getattr(type(owner), attribute, None), Tensor)
    if not (is_buffer or attribute in vars(owner) or is_class_tensor):
        return None
    value = getattr(owner, attribute)
    if value is not None and not (isinstance(value, Tensor) and not value.numel()):
        return None
    kind = _buffer_kind(owner, attribute) if is_buffer else "attribute"
    return TensorPlace(name=name, kind=kind, owner=owner, attribute=attribute, tensor=None)


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules give besides tensors, by the module's name."""
    return {
        name: module.get_extra_state()
        for name, module in named_owners(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


Undo = list[Callable[[], object]]


@contextmanager
def undo_on_error() -> Iterator[Undo]:
    """A block that notes how each change is undone; all of them are, last first, if it raises."""
    undo: Undo = []
    try:
        yield undo
    except BaseException as error:
        while undo:
            try:
                undo.pop()()
            except Exception as failure:  # the others are put back all the same
                error.add_note(f"One part could not be put back: {failure!r}")
        raise


def put_in_place(
    contents: Contents, members: Members, judged: Judged, *, random: RandomState | None = None
) -> None:
    """Put everything that was judged to fit in place, or nothing if anything fails."""
    states = [
        *zip(members.schedulers, contents.schedulers, strict=False),
        *zip(members.parts["scaler"], contents.parts["scaler"], strict=False),
        *judged.other_averages,
    ]
    with undo_on_error() as undo:
        for optimizer, record in zip(members.optimizers, contents.optimizers, strict=False):
            _place_optimizer(undo, optimizer, with_tensors(record.state_dict))
        for member, state in states:
            undo.append(partial(member.load_state_dict, copy.deepcopy(member.state_dict())))
            member.load_state_dict(with_tensors(state))
        for module, fit in judged.fits:
            owners = dict(named_owners(module))
            for name, state in fit.extra_states.items():
                before = copy.deepcopy(owners[name].get_extra_state())
                undo.append(partial(owners[name].set_extra_state, before))
                owners[name].set_extra_state(with_tensors(state))
            place_tensors(undo, fit.moves, module)
        if random is not None:
            undo.append(type(random).capture().restore)
            random.restore()


@torch.no_grad()
def place_tensors(undo: Undo, moves: Iterable[tuple[TensorPlace, Held]], model: nn.Module) -> None:
    """Copy into the tensors that the model has; empty slots get new ones."""
    once = {place.identity: (place, held) for place, held in moves}.values()
    uses = Counter(id(held.tensor) for _, held in once)
    for place, held in once:
        target, value = place.tensor, held.tensor
        assert value is not None, held.key
        if target is None:
            _fill_slot(undo, place, value, model)
            continue
        target, value = _on_this_rank(target, value)
        before = target.detach().to("cpu", copy=True)
        undo.append(partial(_copy, target, before))
        target.copy_(value)
        if held.is_private and uses[id(value)] == 1 and before.dtype == held.dtype:
            # The loaded memory takes the old values, so that undoing needs no more of it.
            value.copy_(before)
            undo[-1] = partial(_copy, target, value)


def _on_this_rank(target: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of this rank's shards, where the target is a DTensor; no rank asks another."""
    if not is_sharded(target):
        return target, value
    return local(target), local(like(target, value))


def like(target: Any, value: Tensor) -> Tensor:
    """The value as a DTensor with the target's placements; a whole one is cut on this rank."""
    if is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = target.device_mesh, target.placements
    return distribute_tensor(value.to(target.device), mesh, placements, src_data_rank=None)


@torch.no_grad()
def _copy(target: Tensor, value: Tensor) -> None:
    target.copy_(value)


def _fill_slot(undo: Undo, place: TensorPlace, value: Tensor, model: nn.Module) -> None:
    owner, name = place.owner, place.attribute
    slots: dict[str, Any] = owner._buffers if name in owner._buffers else vars(owner)
    if name in slots:
        undo.append(partial(slots.__setitem__, name, slots[name]))
    else:
        undo.append(partial(slots.pop, name))
    others = (t for module in (owner, model) for t in (*module.parameters(), *module.buffers()))
    device = next((tensor.device for tensor in others), torch.device("cpu"))
    slots[name] = value.to(device, copy=True)


def _place_optimizer(undo: Undo, optimizer: Optimizer, loaded: Any) -> None:
    """Load the state; torch would cast it to the parameters' dtype, here it keeps its own."""
    state, groups = optimizer.state, optimizer.param_groups
    old_groups = [dict(group) for group in groups]
    old_states = {key: copy.copy(value) for key, value in state.items()}

    def give_back() -> None:
        optimizer.state, optimizer.param_groups = state, groups
        for group, items in zip(groups, old_groups, strict=True):
            group.clear()
            group.update(items)
        state.clear()
        state.update(old_states)

    undo.append(give_back)
    ids = [number for group in loaded["param_groups"] for number in group["params"]]
    for number, param in zip(ids, params_of(optimizer), strict=True):
        saved = loaded.get("state", {}).get(number)
        for name, value in saved.items() if is_sharded(param) and isinstance(saved, dict) else ():
            if isinstance(value, Tensor) and value.shape == param.shape:
                saved[name] = like(param, value)
    optimizer.load_state_dict(loaded)
    for number, param in zip(ids, params_of(optimizer), strict=True):
        saved = loaded.get("state", {}).get(number)
        present = optimizer.state.get(param)
        if not isinstance(saved, dict) or not isinstance(present, dict):
            continue
        for name, value in saved.items():
            now = present.get(name)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                present[name] = value.to(now.device)
