"""Every optimizer of torch in every mode that runs here, and the bytes of what it holds."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.detect.hooks import StepListener

NAN = float("nan")
BAD = [float("nan"), float("inf"), float("-inf")]
FLAGS = ("amsgrad", "centered", "nesterov", "maximize", "decoupled_weight_decay")
NEEDED = {"nesterov": {"momentum": 0.9}, "centered": {"momentum": 0.9}}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True, "foreach": True},
    "differentiable": {"differentiable": True},
}


class Recorder(StepListener):
    """A listener that vetoes, and remembers what it was told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.given: list[tuple[Tensor, Tensor]] = []

    def refused(self, optimizer: Any, gradients: Any, *, late: bool) -> bool:
        self.events.append("late" if late else "refused")
        self.given = gradients
        return True

    def skipped_by_scaler(self, optimizer: Any, *, scaler: Any) -> None:
        self.events.append("scaler")


class Parameters:
    """Parameters of the shapes and kinds that people have: also frozen, unused and expanded."""

    def __init__(self, cls: type[Optimizer]) -> None:
        torch.manual_seed(0)
        matrices_only = cls in (torch.optim.Muon, torch.optim.SparseAdam)
        shapes = [(4, 3), (3, 2)] if matrices_only else [(4, 3), (3,), (), (2, 2, 2)]
        self.used = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        unused = nn.Parameter(torch.randn(2, 2))
        self.sparse = cls is torch.optim.SparseAdam
        self.all = self.used if self.sparse else [*self.used, frozen, unused]
        self._seed = 0

    def gradients(self, *, bad: float | None = None) -> list[Tensor]:
        self._seed += 1
        torch.manual_seed(self._seed)
        grads = [torch.randn(p.shape) for p in self.used]
        if bad is not None:
            grads[0].view(-1)[-1] = bad
        if self.sparse:
            return [g.to_sparse() for g in grads]
        return grads

    def fill(self, *, bad: float | None = None) -> None:
        for param, grad in zip(self.used, self.gradients(bad=bad), strict=True):
            param.grad = grad


def classes() -> list[type[Optimizer]]:
    found = [c for c in vars(torch.optim).values() if inspect.isclass(c)]
    return [c for c in found if issubclass(c, Optimizer) and c is not Optimizer]


def variants() -> Iterator[Any]:
    for cls in classes():
        known = inspect.signature(cls).parameters
        modes = [(n, o) for n, o in MODES.items() if set(o) <= set(known) and works(cls, o)]
        for name, options in modes:
            yield pytest.param(cls, options, id=f"{cls.__name__}-{name}")
        for flag in (f for f in FLAGS if f in known):
            options = {flag: True, **NEEDED.get(flag, {})}
            yield pytest.param(cls, options, id=f"{cls.__name__}-{flag}")
    for line_search in (None, "strong_wolfe"):
        options = {"line_search_fn": line_search, "max_iter": 4}
        yield pytest.param(torch.optim.LBFGS, options, id=f"LBFGS-{line_search}")
    yield pytest.param(torch.optim.SGD, {"fused": True, "momentum": 0.9}, id="SGD-fused-momentum")
    yield pytest.param(torch.optim.Adam, {"fused": True, "amsgrad": True}, id="Adam-fused-amsgrad")


def works(cls: type[Optimizer], options: dict[str, Any]) -> bool:
    """Whether torch itself can do it on this machine (capturable is mostly for GPUs)."""
    params = Parameters(cls)
    try:
        step(cls(params.all, **{"lr": 0.1, **options}), params)
    except (RuntimeError, AssertionError, NotImplementedError):
        return False
    return True


def step(optimizer: Optimizer, params: Parameters, *, bad: float | None = None) -> None:
    """One step; LBFGS takes its gradients from a closure, the others find them in place."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        params.fill(bad=bad)
        optimizer.step()
        return

    def closure() -> float:
        params.fill(bad=bad)
        return 1.0

    optimizer.step(closure)


def image(value: Any) -> Any:
    """The bytes of everything inside."""
    if isinstance(value, Optimizer):
        return image([value.param_groups, list(value.state.items())])
    if isinstance(value, Tensor):
        value = value.detach()
        if value.is_sparse:
            return image([value._indices(), value._values()])
        flat = value.contiguous().view(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), bytes(flat.tolist())
    if isinstance(value, dict):
        return {key: image(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [image(item) for item in value]
    return repr(value)


def make(cls: type[Optimizer], options: dict[str, Any]) -> tuple[Optimizer, Parameters]:
    params = Parameters(cls)
    return cls(params.all, **{"lr": 0.1, **options}), params


def fresh(cls: type[Optimizer] = torch.optim.SGD, **options: Any) -> tuple[Optimizer, Parameters]:
    return make(cls, options)


every_variant = pytest.mark.parametrize(("cls", "options"), list(variants()))
