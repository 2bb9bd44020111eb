"""Run a step again under the tracer, exactly, and put everything back afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stayfinite.detect.scan import all_finite
from stayfinite.detect.walk import named_tensors
from stayfinite.errors import InputError
from stayfinite.locate.origin import origin_of
from stayfinite.locate.tracer import Tracer
from stayfinite.records import Origin
from stayfinite.snapshot import Snapshot

LossFunction = Callable[..., Tensor]


def find_source(
    model: nn.Module, inputs: Any, *, targets: Any = None, loss_fn: LossFunction | None = None
) -> Origin | None:
    """Where one forward and backward pass goes bad first; None when it stays finite.

    `inputs` is a tensor, a tuple of positional or a dict of keyword arguments. Without
    `loss_fn` the model's own loss is used, or the sum of its float outputs. The model, its
    gradients and all random states are as before afterwards.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    snapshot = Snapshot([model])
    tracer = Tracer()
    try:
        # A dispatch mode sees nothing inside compiled code.
        with torch.compiler.set_stance("force_eager"), torch.enable_grad(), tracer:
            bad = bad_values(model, inputs, targets, loss_fn, tracer)
            found = origin_of(tracer.events_of(bad), folder=os.getcwd()) if bad else None
    finally:
        snapshot.restore()
    return found[0] if found else None


def bad_values(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction | None,
    tracer: Tracer | None = None,
) -> list[Tensor]:
    """The loss if it is not finite, else the gradients that are not, after a backward pass."""
    return one_pass(model, inputs, targets, loss_fn, tracer)[1]


def one_pass(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss_fn: LossFunction | None,
    tracer: Tracer | None = None,
    *,
    weight: float = 1.0,
) -> tuple[Tensor, list[Tensor]]:
    """The loss of a forward and backward pass, and what is bad; `weight` multiplies the loss."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(call(model, inputs), targets, loss_fn)
    loss = loss if weight == 1.0 else loss * weight
    if not _is_finite(loss, tracer):
        return loss, [loss]
    if loss.requires_grad:
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return loss, [g for g in gradients if not _is_finite(g, tracer)]


def _is_finite(tensor: Tensor, tracer: Tracer | None) -> bool:
    if tracer is None:
        return all_finite([tensor])
    with tracer.paused():
        return all_finite([tensor])


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output for inputs as people pass them."""
    if isinstance(inputs, Mapping) or (hasattr(inputs, "keys") and hasattr(inputs, "__getitem__")):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def loss_of(output: Any, targets: Any, loss_fn: LossFunction | None) -> Tensor:
    """One number to differentiate: loss_fn's, the model's own loss, or the sum of its outputs."""
    if loss_fn is not None:
        loss = loss_fn(output) if targets is None else loss_fn(output, targets)
        if not isinstance(loss, Tensor):
            raise InputError(f"loss_fn returned a {type(loss).__name__}; it must return a tensor.")
        return loss.sum()
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own.sum()
    floats = [t for _, t in named_tensors(output, "output") if t.is_floating_point()]
    if not floats:
        raise InputError(
            f"the model returned a {type(output).__name__} without a float tensor; "
            "pass loss_fn to say what is to be finite."
        )
    return torch.stack([tensor.sum().float() for tensor in floats]).sum()
