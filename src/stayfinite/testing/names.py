"""Names that people give, and the nearest ones when there is no such thing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.errors import ConfigError

# softmax reaches the device as _softmax or _safe_softmax, batch_norm as native_batch_norm.
_AS_DISPATCHED = ("_{}", "_safe_{}", "native_{}", "{}_forward")


def unknown(option: str, name: str, *, what: str, known: Iterable[str]) -> ConfigError:
    """The error that says what `option` could have been."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.0)
    nearest = f" Nearest: {', '.join(map(repr, near))}." if near else ""
    return ConfigError(f"{option} is {name!r}; {what}.{nearest}")


def module_named(model: nn.Module, name: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name not in modules:
        what = f"{type(model).__name__} has no module of that name"
        raise unknown("module", name, what=what, known=[known for known in modules if known])
    return modules[name]


def parameter_named(model: nn.Module, name: str, *, option: str) -> nn.Parameter:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if name not in parameters:
        what = f"{type(model).__name__} has no parameter of that name"
        raise unknown(option, name, what=what, known=parameters)
    return parameters[name]


def state_of(optimizer: Optimizer, parameter: nn.Parameter, *, name: str, key: str) -> Tensor:
    """The tensor that the optimizer keeps under that key; known once it has made an update."""
    kept = {k: v for k, v in optimizer.state.get(parameter, {}).items() if isinstance(v, Tensor)}
    if not kept:
        raise ConfigError(
            f"state is {f'{name}.{key}'!r}, but {type(optimizer).__name__} keeps no tensors for "
            f"{name} at this step. Most optimizers keep none before their first update."
        )
    if key not in kept:
        what = f"{type(optimizer).__name__} keeps no such tensor for {name}"
        raise unknown("state", f"{name}.{key}", what=what, known=[f"{name}.{k}" for k in kept])
    return kept[key]


def ops_named(name: str) -> frozenset[str]:
    """The operators, as "aten._softmax", that run for a name such as "softmax"."""
    dotted = name.replace("::", ".")
    every = torch._C._dispatch_get_all_op_names()
    running = {_packet(op) for op in every if _computes(op)}
    for full in (dotted, f"aten.{dotted}"):
        if full in running or full.rpartition(".")[0] in running:
            return frozenset([full])
    base = dotted.removeprefix("aten.")
    if found := running.intersection(f"aten.{form.format(base)}" for form in _AS_DISPATCHED):
        return frozenset(found)
    known = f"aten.{base}" in {_packet(op) for op in every}
    why = "is a view or made of other operators" if known else "is not known to torch"
    aten = [op for op in running if op.startswith("aten.")]
    raise unknown("op", name, what=f"it {why}; name one that computes", known=aten)


def _packet(op: str) -> str:
    """aten::log.out is aten.log."""
    return op.partition(".")[0].replace("::", ".")


def _computes(name: str) -> bool:
    """Whether an operator reaches the device: it is not made of others, nor a view."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return False
    base, _, overload = name.partition(".")
    schema = torch._C._get_schema(base, overload)
    views = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
    return bool(views) and not any(views) and not any(a.is_out for a in schema.arguments)
