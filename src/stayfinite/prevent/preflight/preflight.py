"""preflight(): the risks of a model, an optimizer and a batch, before training begins."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stayfinite.errors import InputError
from stayfinite.living import leaves_of
from stayfinite.locate.search import LossFunction, call, inputs_and_targets, loss_of, observable
from stayfinite.locate.source import user_place
from stayfinite.nested import map_leaves
from stayfinite.prevent.data.check import batch_risks
from stayfinite.prevent.preflight.probe import device_of, probe, with_values
from stayfinite.prevent.preflight.rehearsal import Rehearsal
from stayfinite.prevent.preflight.training_checks import optimizer_risks
from stayfinite.prevent.risks import Risk, as_info, proven, rank_risks, worst_of_each
from stayfinite.settings import require_choice
from stayfinite.snapshot import Snapshot
from stayfinite.training import require_module

Precision = Literal["fp32", "fp16", "bf16"]
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def preflight(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    batch: Any = None,
    loss_fn: LossFunction | None = None,
    precision: Precision | None = None,
) -> list[Risk]:
    """Everything that can end this training with NaN or Inf, the worst first, each with its fix.

    A batch is (inputs, targets) for `loss_fn(model(inputs), targets)`; without `loss_fn` it is
    what the model itself turns into a loss. With a batch, one forward and backward pass is traced
    and probed with zeros, ones and large inputs; without one, only weights and optimizer are
    looked at. `precision` is what training runs in; None: as the model is. The model, the
    optimizer, the batch and all random states are as before afterwards.

    >>> class Entropy(nn.Module):
    ...     def forward(self, x):
    ...         p = torch.softmax(x, -1)
    ...         return -(p * torch.log(p)).sum(-1)
    >>> model = nn.Sequential(nn.Linear(8, 4), Entropy())
    >>> [(risk.level, risk.cause) for risk in preflight(model, batch=torch.randn(16, 8))]
    [('medium', 'log_of_zero')]
    """
    _require(model, optimizer, precision)
    if batch is None:
        return _at_rest(model, optimizer)
    _require_one_batch(model, batch)
    modules = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    keeper = Keeper(modules)
    rehearsal = Rehearsal(
        folder=os.getcwd(), outside=user_place(sys._getframe(1)), on_new=keeper.add_module
    )
    own = map_leaves(batch, lambda tensor: with_values(tensor, torch.clone))
    inputs, targets = inputs_and_targets(own, loss_fn)

    def run(value: Any) -> Tensor:
        with _autocast(model, precision):
            return loss_of(call(model, value), targets, loss_fn)

    edges: list[Risk] = []
    try:
        model.train()
        of_batch = _rehearse(rehearsal, keeper, model, optimizer, own, loss_fn, precision)
        found = [*rehearsal.risks(), *of_batch]
        keeper.restore()
        model.train()
        if rehearsal.is_finite:
            in_half = rehearsal.recorder.trains_in_half
            edges = probe(modules, inputs, run, places=rehearsal.places, in_half=in_half)
    finally:
        keeper.restore()
    return worst_of_each(proven(found, edges))


def _require(model: Any, optimizer: Any, precision: Any) -> None:
    require_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("model is scripted, and nothing is seen inside; give the module itself.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("model is on the meta device, where weights have no values.")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise InputError(f"optimizer is a {kind}; it must be a torch.optim.Optimizer, or None.")
    if precision is not None:
        require_choice("precision", precision, get_args(Precision))


def _require_one_batch(model: nn.Module, batch: Any) -> None:
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise InputError("model has lazy parameters; call it once, so that they get their shapes.")
    if isinstance(batch, DataLoader | Iterator):
        kind = type(batch).__name__
        raise InputError(f"batch is a {kind}; give one batch of it: `next(iter(loader))`.")


def _at_rest(model: nn.Module, optimizer: Optimizer | None) -> list[Risk]:
    rehearsal = Rehearsal(folder=os.getcwd())
    rehearsal.enter_module(model, ())
    found = rehearsal.risks()
    if optimizer is not None:
        found += optimizer_risks(optimizer, type(optimizer).__name__)
    return rank_risks(found)


def _rehearse(
    rehearsal: Rehearsal,
    keeper: Keeper,
    model: nn.Module,
    optimizer: Optimizer | None,
    batch: Any,
    loss_fn: LossFunction | None,
    precision: Precision | None,
) -> list[Risk]:
    """One pass, told to the rehearsal; what is wrong with the batch is given back.

    A batch that a loss refuses, as labels out of range, is a risk and not an error.
    """
    inputs, targets = inputs_and_targets(batch, loss_fn)
    # Only the weights tell whether float16 is meant without a scaler.
    rehearsal.scaling.scales_itself = precision is not None
    model.zero_grad(set_to_none=True)
    of_batch: list[Risk] = []
    with observable(), rehearsal.recorder:
        with _autocast(model, precision):
            output = call(model, inputs)
            with rehearsal.recorder.paused():
                of_batch = batch_risks(batch, classes=_classes(output, targets))
            try:
                loss = loss_of(output, targets, loss_fn)
            except InputError:
                raise
            except Exception:
                if any(risk.level == "high" for risk in of_batch):
                    rehearsal.is_finite = False
                    return of_batch
                raise
        rehearsal.before_backward([loss], None)
        if loss.requires_grad:
            with rehearsal.recorder.paused():
                keeper.add_leaves(loss)
            loss.backward()
            rehearsal.after_backward()
        if optimizer is not None:
            rehearsal.before_update(optimizer, is_scaled=False, place=None)
    if not rehearsal.is_finite:
        return of_batch
    # A NaN in the batch that the loss does not see is worth knowing only.
    return [as_info(risk) if risk.cause == "bad_input_data" else risk for risk in of_batch]


def _classes(output: Any, targets: Any) -> int | None:
    """How many classes labels can have, if targets are labels."""
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor):
        return None
    is_labels = not targets.is_floating_point() and targets.dim() == output.dim() - 1
    return output.shape[1] if is_labels and output.dim() > 1 else None


def _autocast(
    model: nn.Module, precision: Precision | None
) -> contextlib.AbstractContextManager[Any]:
    if precision not in _DTYPES:
        return contextlib.nullcontext()
    return torch.autocast(device_of(model), dtype=_DTYPES[precision])


class Keeper:
    """Modules, gradients and random states as they were.

    A loss function may call modules and use tensors that nobody named: they are added when they
    are met, before they change.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._snapshots = [Snapshot(modules)]
        self._known = {id(part) for module in modules for part in module.modules()}
        self._gradients: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    def add_module(self, module: nn.Module) -> None:
        """A module that is about to be called."""
        if id(module) not in self._known:
            self._known.update(id(part) for part in module.modules())
            self._snapshots.append(Snapshot([module]))

    def add_leaves(self, loss: Tensor) -> None:
        """All tensors that a backward pass from the loss will give a gradient."""
        for leaf in leaves_of([loss]):
            gradient = leaf.grad
            kept = None if gradient is None else gradient.detach().clone()
            self._gradients.setdefault(id(leaf), (leaf, gradient, kept))

    def restore(self) -> None:
        """Put all back; the earliest state comes last."""
        with torch.no_grad():
            for leaf, gradient, kept in self._gradients.values():
                if gradient is not None and kept is not None:
                    gradient.copy_(kept)
                leaf.grad = gradient
        for snapshot in reversed(self._snapshots):
            snapshot.restore()
