"""Who is saved or loaded, where a model keeps its tensors, and loaded values put in place.

If anything fails on the way, everything is put back.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stayfinite.checkpoint.values import Held, PlaceKind, with_tensors
from stayfinite.errors import InputError

if TYPE_CHECKING:
    from stayfinite.checkpoint.checks import Judged
    from stayfinite.checkpoint.values import Contents


@dataclass(frozen=True, kw_only=True)
class Members:
    """The members of a training job."""

    models: tuple[nn.Module, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    averages: tuple[Any, ...] = ()

    @property
    def has_none(self) -> bool:
        everyone = (*self.models, *self.optimizers, *self.schedulers, *self.averages)
        return not everyone and self.scaler is None


def gather(*, model: Any, optimizer: Any, scheduler: Any, scaler: Any, ema: Any) -> Members:
    """Members from what people pass; InputError names what is none."""
    return Members(
        models=_several(model, "model", nn.Module),
        optimizers=_several(optimizer, "optimizer", Optimizer),
        schedulers=_stateful(_several(scheduler, "scheduler", object), "scheduler"),
        scaler=next(iter(_stateful(_several(scaler, "scaler", object), "scaler")), None),
        averages=_stateful(_several(ema, "ema", object), "ema"),
    )


def _several(value: Any, name: str, kind: type) -> tuple[Any, ...]:
    if value is None:
        return ()
    members = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for member in members:
        if not isinstance(member, kind):
            raise InputError(
                f"{name} is a {type(member).__name__}; it must be a {kind.__name__} or a list "
                "of them."
            )
    return members


def _stateful(members: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    for member in members:
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
                if parameter is not None:
                    full = canonical(f"{prefix}.{name}" if prefix else name)
                    names.setdefault(id(parameter), above + full)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [names.get(id(param)) for param in params]


_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
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
        yield canonical(name), module


def canonical(name: str) -> str:
    """The name as it is without torch.compile and other wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def places(model: nn.Module) -> dict[str, Place]:
    """Every tensor of the model by name.

    Plain attributes count unless they were computed with a graph or are recomputed by a hook, like
    the weight of weight_norm.
    """
    found: dict[str, Place] = {}
    for above, owner in named_owners(model):
        for kind, attribute, tensor in _tensors(owner):
            name = joined(above, attribute)
            found.setdefault(
                name, Place(name=name, kind=kind, owner=owner, attribute=attribute, tensor=tensor)
            )
    return found


def joined(above: str, attribute: str) -> str:
    return f"{above}.{attribute}" if above else attribute


def _tensors(owner: nn.Module) -> Iterator[tuple[PlaceKind, str, Tensor]]:
    for name, parameter in owner._parameters.items():
        if parameter is not None:
            yield "parameter", name, parameter
    for name, buffer in owner._buffers.items():
        if buffer is not None:
            is_kept = name not in owner._non_persistent_buffers_set
            yield "buffer" if is_kept else "non-persistent buffer", name, buffer
    for name, value in vars(owner).items():
        if isinstance(value, Tensor) and not is_derived(owner, name):
            yield "attribute", name, value


def is_derived(owner: nn.Module, attribute: str) -> bool:
    """Whether the attribute is computed anew at each forward pass."""
    value = vars(owner).get(attribute)
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return True
    hooks = owner._forward_pre_hooks.values()
    return any(getattr(hook, "name", None) == attribute for hook in hooks)


def slot_for(model: nn.Module, name: str) -> Place | None:
    """An empty slot with this name: a buffer or an attribute that is None or has no elements."""
    above, _, attribute = name.rpartition(".")
    owner = dict(named_owners(model)).get(above)
    if owner is None:
        return None
    kind: PlaceKind
    if attribute in owner._buffers:
        is_kept = attribute not in owner._non_persistent_buffers_set
        kind = "buffer" if is_kept else "non-persistent buffer"
    elif attribute in vars(owner) or _is_class_tensor(owner, attribute):
        kind = "attribute"
    else:
        return None
    if not is_empty(getattr(owner, attribute)):
        return None
    return Place(name=name, kind=kind, owner=owner, attribute=attribute, tensor=None)


def is_derived_name(model: nn.Module, name: str) -> bool:
    above, _, attribute = name.rpartition(".")
    owner = dict(named_owners(model)).get(above)
    return owner is not None and attribute in vars(owner) and is_derived(owner, attribute)


def _is_class_tensor(owner: nn.Module, attribute: str) -> bool:
    return isinstance(getattr(type(owner), attribute, None), Tensor)


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Tensor) and not value.numel())


def device_of(owner: nn.Module, model: nn.Module) -> torch.device:
    """Where a new tensor of this module belongs."""
    for module in (owner, model):
        for tensor in (*module.parameters(), *module.buffers()):
            return tensor.device
    return torch.device("cpu")


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules give besides tensors, by the module's name."""
    return {
        name: module.get_extra_state()
        for name, module in named_owners(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


class Placing:
    """A `with` block whose changes are undone if it is left by an exception."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._undo and error is not None:
            try:
                self._undo.pop()()
            except Exception as failure:  # the others are put back all the same
                error.add_note(f"One part could not be put back: {failure!r}")
        self._undo.clear()

    def parts(self, contents: Contents, members: Members, judged: Judged) -> None:
        """Everything that was judged to fit, less the random states."""
        for optimizer, record in zip(members.optimizers, contents.optimizers, strict=False):
            self.optimizer(optimizer, record.state_dict)
        for scheduler, state in zip(members.schedulers, contents.schedulers, strict=False):
            self.state(scheduler, state)
        if members.scaler is not None and contents.scaler is not None:
            self.state(members.scaler, contents.scaler)
        for average, state in judged.other_averages:
            self.state(average, state)
        for module, fit in judged.fits:
            self.extra_states(fit.extra_states, module)
            self.tensors(fit.moves, module)

    @torch.no_grad()
    def tensors(self, moves: Iterable[tuple[Place, Held]], model: nn.Module) -> None:
        """Copy into the tensors that the model has; empty slots get new ones."""
        once = {place.identity: (place, held) for place, held in moves}.values()
        uses = Counter(id(held.tensor) for _, held in once)
        for place, held in once:
            assert held.tensor is not None, held.key
            if place.tensor is None:
                self._fill(place, held.tensor, device_of(place.owner, model))
                continue
            before = self._copy(place.tensor, held.tensor)
            if held.is_private and uses[id(held.tensor)] == 1 and before.dtype == held.dtype:
                self._keep_in(held.tensor, before, place.tensor)

    def _copy(self, target: Tensor, value: Tensor) -> Tensor:
        """Copy the value; gives the values of before, in memory that the model does not need."""
        before = target.detach().to("cpu", copy=True)
        self._undo.append(lambda: _put_back(target, before))
        target.copy_(value)
        return before

    def _keep_in(self, loaded: Tensor, before: Tensor, target: Tensor) -> None:
        """Let the loaded memory take the old values, so that undoing needs no more of it."""
        loaded.copy_(before)
        self._undo[-1] = lambda: _put_back(target, loaded)

    def _fill(self, place: Place, value: Tensor, device: torch.device) -> None:
        owner, name = place.owner, place.attribute
        slots = owner._buffers if name in owner._buffers else vars(owner)
        was_there, before = name in slots, slots.get(name)

        def undo() -> None:
            if was_there:
                slots[name] = before
            else:
                del slots[name]

        self._undo.append(undo)
        slots[name] = value.to(device, copy=True)

    def extra_states(self, states: Mapping[str, Any], model: nn.Module) -> None:
        owners = dict(named_owners(model))
        for name, state in states.items():
            owner = owners[name]
            before = copy.deepcopy(owner.get_extra_state())
            self._undo.append(_call(owner.set_extra_state, before))
            owner.set_extra_state(with_tensors(state))

    def optimizer(self, optimizer: Optimizer, state_dict: Any) -> None:
        """Load the state; torch would cast it to the parameters' dtype, here it keeps its own."""
        before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
        groups = [dict(group) for group in optimizer.param_groups]
        states = {key: copy.copy(value) for key, value in optimizer.state.items()}
        self._undo.append(lambda: _give_back(optimizer, before, groups, states))
        loaded = with_tensors(state_dict)
        optimizer.load_state_dict(loaded)
        _keep_dtypes(optimizer, loaded)

    def state(self, member: Any, state: Any) -> None:
        """Load whatever has state_dict() and load_state_dict()."""
        before = copy.deepcopy(member.state_dict())
        self._undo.append(_call(member.load_state_dict, before))
        member.load_state_dict(with_tensors(state))

    def calling(self, restore: Callable[[], None], change: Callable[[], None]) -> None:
        """Any other change, with how to undo it."""
        self._undo.append(restore)
        change()


def _call(function: Callable[[Any], Any], value: Any) -> Callable[[], None]:
    def undo() -> None:
        function(value)

    return undo


@torch.no_grad()
def _put_back(target: Tensor, before: Tensor) -> None:
    target.copy_(before)


def _give_back(
    optimizer: Optimizer, before: dict[str, Any], groups: list[Any], states: dict[Any, Any]
) -> None:
    optimizer.state, optimizer.param_groups = before["state"], before["param_groups"]
    for group, items in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(items)
    optimizer.state.clear()
    optimizer.state.update(states)


def _keep_dtypes(optimizer: Optimizer, loaded: Any) -> None:
    ids = [number for group in loaded["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(ids, params, strict=True):
        saved = loaded.get("state", {}).get(number)
        present = optimizer.state.get(param)
        if not isinstance(saved, dict) or not isinstance(present, dict):
            continue
        for name, value in saved.items():
            now = present.get(name)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                present[name] = value.to(now.device)
