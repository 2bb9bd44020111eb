"""Modules in a higher precision: one of them for good, or some for the time of a replay."""

from __future__ import annotations

import contextlib
import operator
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from stayfinite.detect.hooks import wrapped
from stayfinite.snapshot.walk import Census, add_attributes

Dtypes = tuple[torch.dtype | None, ...]

HALF = (torch.float16, torch.bfloat16)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_WRAPPERS = ("module", "_orig_mod")  # DistributedDataParallel, torch.compile


def find_module(model: nn.Module | None, name: str | None) -> nn.Module | None:
    """The submodule of this dotted name, also inside what wraps the model; "" is the model."""
    if model is None or name is None:
        return None
    with contextlib.suppress(AttributeError):
        return model.get_submodule(name)
    inner = [getattr(model, wrapper, None) for wrapper in _WRAPPERS]
    found = (find_module(each, name) for each in inner if isinstance(each, nn.Module))
    return next((module for module in found if module is not None), None)


def is_raised(module: nn.Module) -> bool:
    """Whether run_in_float32() is in force for this very module."""
    return isinstance(vars(module).get("forward"), Float32Forward)


def has_half_tensors(module: nn.Module) -> bool:
    """Whether a parameter or buffer in it is a 16-bit float."""
    return any(tensor.dtype in HALF for tensor in _tensors(module).values())


def run_in_float32(module: nn.Module) -> Float32Forward:
    """Let the module compute in float32 from now on; a second call changes nothing.

    Parameters and buffers stay what they are, and gradients arrive at them as before.
    """
    if not is_raised(module):
        vars(module)["forward"] = Float32Forward(module)
    forward: Float32Forward = vars(module)["forward"]
    return forward


class Float32Forward:
    """Stands in for a module's `forward`; `undo` gives the module its own back."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = vars(module).get("forward")
        self._returned: dict[Any, Dtypes] = {}

    def undo(self) -> None:
        """The module runs as it did before; a second call does nothing."""
        own = vars(self._module)
        if own.get("forward") is self:
            del own["forward"]
            if self._before is not None:
                own["forward"] = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        if devices := _autocast_devices(self._module, given):
            return self._without_autocast(devices, given)
        return self._as_before(self._in_float32(given), given)

    def _without_autocast(self, devices: list[str], given: Any) -> Any:
        if not devices:
            return self._in_float32(given)
        with torch.autocast(devices[0], enabled=False):
            return self._without_autocast(devices[1:], given)

    def _in_float32(self, given: Any) -> Any:
        raised = tree_map(
            lambda x: x.float() if isinstance(x, Tensor) and x.dtype in HALF else x, given
        )
        half = {name: t for name, t in _tensors(self._module).items() if t.dtype in HALF}
        if not half:
            return self._forward(raised)
        full = {name: tensor.float() for name, tensor in half.items()}
        result = self._forward(raised, full)
        with torch.no_grad():
            for name, buffer in self._module.named_buffers():
                if name in half:  # running statistics; batch norm writes them unseen
                    buffer.copy_(full[name])
        return result

    def _forward(self, given: Any, tensors: dict[str, Tensor] | None = None) -> Any:
        """The module's own forward, with other tensors in the place of its own.

        The public functional_call would run the module's hooks a second time.
        """
        args, kwargs = given
        with _reparametrize_module(self._module, tensors or {}, tie_weights=True):
            if self._before is not None:
                return self._before(*args, **kwargs)
            return type(self._module).forward(self._module, *args, **kwargs)

    def _as_before(self, result: Any, given: Any) -> Any:
        """What follows expects the types that the module used to return."""
        leaves, spec = tree_flatten(result)
        if not any(_is_float32(leaf) for leaf in leaves):
            return result
        dtypes = self._types_of(given, len(leaves))
        cast = [
            leaf.to(dtype) if _is_float32(leaf) and dtype in HALF else leaf
            for leaf, dtype in zip(leaves, dtypes, strict=True)
        ]
        return tree_unflatten(cast, spec)

    def _types_of(self, given: Any, count: int) -> Dtypes:
        inputs = [leaf.dtype for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        tensors = [tensor.dtype for tensor in _tensors(self._module).values()]
        floats = {dtype for dtype in (*inputs, *tensors) if dtype.is_floating_point}
        if not floats & set(HALF):
            return (None,) * count
        key = (*inputs, self._module.training)
        if key not in self._returned and not torch.compiler.is_compiling():
            self._returned[key] = self._dtypes_of_result(given)
        known = self._returned.get(key, ())
        if len(known) == count:
            return known
        # It could not be tried out: 16-bit in, 16-bit out, unless there was float32 as well.
        return (floats.pop() if len(floats) == 1 else None,) * count

    def _dtypes_of_result(self, given: Any) -> Dtypes:
        """The dtypes that a call used to return, found without computing; empty if that fails."""
        # Nobody's dispatch mode may see a call that is only pretended; there is no public switch.
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with _disable_current_modes(), fake, torch.no_grad(), _quiet(self._module):
                tensors, pretended = tree_map(
                    lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf,
                    (_tensors(self._module), given),
                )
                result = self._forward(pretended, tensors)
        except Exception:  # a branch on values, an operator without a fake kernel
            return ()
        return tuple(getattr(leaf, "dtype", None) for leaf in tree_leaves(result))


@contextlib.contextmanager
def _quiet(root: nn.Module) -> Iterator[None]:
    """Run without hooks, and forget what the modules note down meanwhile."""
    census, modules = Census(), list(root.modules())
    for module in modules:
        add_attributes(census, module, "", "attributes")
    notes = [(cell, cell.content()) for cell in census.cells]
    hooks = [{name: vars(module)[name] for name in _HOOKS} for module in modules]
    try:
        for module in modules:
            vars(module).update((name, OrderedDict()) for name in _HOOKS)
        yield
    finally:
        for module, own in zip(modules, hooks, strict=True):
            vars(module).update(own)
        for cell, content in notes:
            cell.put_back(content)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _is_float32(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype is torch.float32


def _autocast_devices(module: nn.Module, given: Any) -> list[str]:
    """The types of device that are in use here and under autocast."""
    leaves = (*_tensors(module).values(), *tree_leaves(given))
    found = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    available = sorted(each for each in found if torch.amp.is_autocast_available(each))
    return [each for each in available if torch.is_autocast_enabled(each)]


@contextlib.contextmanager
def compute_in(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """A block in which the modules compute in this type and nobody casts to a lower one.

    Only copies are computed with; parameters get their own memory back at the end.
    """
    inner = [module for root in modules for module in root.modules()]
    params = {id(p): p for module in inner for p in module._parameters.values() if p is not None}
    with contextlib.ExitStack() as undo:
        undo.callback(wrapped(torch.autocast, "__enter__", _without_effect).remove)
        for param in params.values():
            undo.callback(_give_back, param, param.data, param.grad)
            param.grad = None
            param.data = _in_type(param.data, dtype)
        for module in inner:
            for name, buffer in module._buffers.items():
                undo.callback(operator.setitem, module._buffers, name, buffer)
                if buffer is not None:
                    module._buffers[name] = _in_type(buffer, dtype).clone()
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                undo.callback(torch.set_autocast_enabled, device, True)
                torch.set_autocast_enabled(device, False)
        yield


def _give_back(param: Tensor, memory: Tensor, gradient: Tensor | None) -> None:
    param.grad = None  # of the higher type, which the memory cannot be given beside
    param.data = memory
    param.grad = gradient


def _in_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    is_lower = tensor.is_floating_point() and tensor.element_size() < dtype.itemsize
    return tensor.to(dtype) if is_lower else tensor


def _without_effect(original: Any) -> Any:
    def enter(self: Any) -> Any:
        before, self._enabled = self._enabled, False
        try:
            return original(self)
        finally:
            self._enabled = before

    return enter
