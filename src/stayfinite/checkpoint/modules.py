"""Where a model keeps its tensors: parameters, buffers, and plain attributes nobody registered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from stayfinite.checkpoint.format.contents import PlaceKind

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
