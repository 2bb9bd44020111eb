"""What can go bad: for each target, a function that attaches a fault to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stayfinite.detect.entrypoints import together
from stayfinite.detect.hooks import Attachment
from stayfinite.errors import ConfigError
from stayfinite.testing.backward import at_loss, at_node
from stayfinite.testing.fault import Fault
from stayfinite.testing.names import module_named, parameter_named, state_of
from stayfinite.testing.operators import at_op


def attach(fault: Fault, model: nn.Module | None, optimizer: Optimizer | None) -> Attachment:
    """Let the fault strike what it aims at, until the attachment is removed."""
    option, name = fault.aim.option, fault.aim.name or ""
    if option in _WITHOUT_MODEL:
        return _WITHOUT_MODEL[option](fault, name)
    if model is None:
        raise ConfigError(f"{fault.aim} needs the model: inject(model, {fault.aim}).")
    if option == "state":
        return at_state(fault, name, model, optimizer)
    return _IN_MODEL[option](fault, name, model)


def at_module(fault: Fault, name: str, model: nn.Module) -> Attachment:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling() and fault.is_due():
            return fault.copied(output, f"modules.{name}" if name else "outputs")
        return None

    # First, so that whoever looks at outputs sees what the next layer sees.
    return _held(module_named(model, name).register_forward_hook(hook, prepend=True))


def at_gradient(fault: Fault, name: str, model: nn.Module) -> Attachment:
    parameter = parameter_named(model, name, option="gradient")
    if not parameter.requires_grad:
        raise ConfigError(f"gradient is {name!r}, but that parameter does not require a gradient.")

    def hook(gradient: Tensor) -> Tensor | None:
        return fault.copied(gradient, f"gradients.{name}") if fault.is_due() else None

    return _held(parameter.register_hook(hook))


def at_inputs(fault: Fault, name: str, model: nn.Module) -> Attachment:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or not fault.is_due():
            return None
        named = {**{str(number): each for number, each in enumerate(args)}, **kwargs}
        bad = fault.copied_at_path(named, "inputs")
        return tuple(bad[str(n)] for n in range(len(args))), {name: bad[name] for name in kwargs}

    return _held(model.register_forward_pre_hook(hook, with_kwargs=True))


def at_parameter(fault: Fault, name: str, model: nn.Module) -> Attachment:
    parameter = parameter_named(model, name, option="parameter")

    def hook(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and fault.is_due():
            fault.write(parameter, f"parameters.{name}")

    # At all modules: parts of a model may be called without the model itself.
    return together(*(_held(each.register_forward_pre_hook(hook)) for each in model.modules()))


def at_state(fault: Fault, name: str, model: nn.Module, optimizer: Optimizer | None) -> Attachment:
    if optimizer is None:
        raise ConfigError(f"{fault.aim} needs the optimizer: inject(model, optimizer, ...).")
    owner, _, key = name.rpartition(".")
    parameter = parameter_named(model, owner, option="state")
    if optimizer.state.get(parameter):
        state_of(optimizer, parameter, name=owner, key=key)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if fault.is_due():
            tensor = state_of(optimizer, parameter, name=owner, key=key)
            fault.write(tensor, f"optimizer.{name}")

    return _held(optimizer.register_step_pre_hook(hook))


def at_batch(fault: Fault, name: str) -> Attachment:
    return Attachment(lambda: None)  # it is delivered by fault.batches()


def _held(handle: RemovableHandle) -> Attachment:
    return Attachment(handle.remove)


_WITHOUT_MODEL: dict[str, Callable[[Fault, str], Attachment]] = {
    "op": at_op,
    "node": at_node,
    "loss": at_loss,
    "batch": at_batch,
}
_IN_MODEL: dict[str, Callable[[Fault, str, nn.Module], Attachment]] = {
    "module": at_module,
    "gradient": at_gradient,
    "inputs": at_inputs,
    "parameter": at_parameter,
}
