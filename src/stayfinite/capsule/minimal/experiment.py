"""One operation with its inputs, and whether its result is bad."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stayfinite.capsule.contents import flat
from stayfinite.capsule.minimal.operators import called, operator
from stayfinite.detect.scan import classify
from stayfinite.records import NaNType

GRADIENT = "gradient"
"""The name of what the backward pass of the operation is given, beside its arguments."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """An operation that is to give a bad value; with a gradient, in its backward pass."""

    op: str
    arguments: Mapping[str, Any]
    wanted: NaNType
    gradient: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name; members of a list have an index."""
        found: dict[str, Tensor] = {}
        for name, value in self.arguments.items():
            _collect(name, value, found)
        return found if self.gradient is None else {**found, GRADIENT: self.gradient}

    def with_tensors(self, change: Callable[[str, Tensor], Tensor]) -> Experiment:
        """The same with other tensors."""
        arguments = {name: _mapped(name, value, change) for name, value in self.arguments.items()}
        gradient = None if self.gradient is None else change(GRADIENT, self.gradient)
        return replace(self, arguments=arguments, gradient=gradient)

    def results(self) -> list[Tensor]:
        """What the operation computes; in a backward pass the gradients of its inputs."""
        function = operator(self.op)
        copy = self.with_tensors(lambda name, tensor: tensor.detach().clone())
        if self.gradient is None:
            with torch.no_grad():
                out = called(function, copy.arguments)
            given = flat([out]) if out is not None else flat(copy.arguments.values())
            return [each for each in given if isinstance(each, Tensor)]
        leaves = [t for n, t in copy.tensors().items() if n != GRADIENT and t.is_floating_point()]
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.enable_grad():
            output = first_differentiable(called(function, copy.arguments))
            assert copy.gradient is not None
            output.backward(copy.gradient)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def is_bad(self) -> bool:
        """Whether a result is not finite in the way that is wanted; an error is no."""
        try:
            return any(classify(each) is self.wanted for each in self.results() if each.numel())
        except (
            RuntimeError,
            ValueError,
            IndexError,
            TypeError,
            AssertionError,
            NotImplementedError,
        ):
            return False

    @property
    def size(self) -> int:
        """How many numbers it is given."""
        return sum(each.numel() for each in self.tensors().values())


def first_differentiable(out: Any) -> Tensor:
    """The output that a gradient is given to."""
    found = [each for each in flat([out]) if isinstance(each, Tensor) and each.requires_grad]
    if not found:
        raise RuntimeError("nothing to differentiate")
    first: Tensor = found[0]
    return first


def _collect(name: str, value: Any, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        found[name] = value
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _collect(f"{name}[{number}]", item, found)


def _mapped(name: str, value: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, list):
        return [_mapped(f"{name}[{number}]", item, change) for number, item in enumerate(value)]
    return value
