"""Experiments to begin with: the real inputs, or ones that their statistics allow."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stayfinite.capsule.contents import Birth, Operation, flat
from stayfinite.capsule.minimal.experiment import Experiment, first_differentiable
from stayfinite.capsule.minimal.operators import called, check_output_size, operator
from stayfinite.checkpoint.format.values import dtype_named
from stayfinite.errors import CapsuleError
from stayfinite.records import TensorSummary

_SIDES = (4, 64, 1 << 30)
_LARGEST = 3 << 20
_MOST = 400


def first_bad(birth: Birth) -> Experiment | None:
    """The first experiment that goes bad as the capsule says; None when none does."""
    return next((each for each in itertools.islice(_all(birth), _MOST) if each.is_bad()), None)


def _all(birth: Birth) -> Iterator[Experiment]:
    """With the backward pass of the forward operation, where there is one; then without."""
    if birth.forward is not None:
        with contextlib.suppress(CapsuleError):
            yield from _backward(birth.forward, birth)
    for arguments in _filled(birth.operation):
        yield Experiment(op=birth.operation.op, arguments=arguments, wanted=birth.nan_type)


def _backward(forward: Operation, birth: Birth) -> Iterator[Experiment]:
    for arguments in _filled(forward):
        shape = _output_shape(forward.op, arguments)
        if shape is None:
            return
        for gradient in _gradients(shape, birth.operation):
            yield Experiment(
                op=forward.op, arguments=arguments, gradient=gradient, wanted=birth.nan_type
            )


def _output_shape(op: str, arguments: Mapping[str, Any]) -> Tensor | None:
    """A tensor like the output that can be differentiated."""
    leaves = {
        name: value.detach().clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }
    try:
        with torch.enable_grad():
            return first_differentiable(called(operator(op), leaves)).detach()
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return None


def _gradients(output: Tensor, operation: Operation) -> Iterator[Tensor]:
    """What may have come in: what the bad operation itself was given first of all."""
    for value in flat(operation.arguments.values()):
        if isinstance(value, Tensor) and value.shape == output.shape:
            yield value.to(output.dtype)
    for value in flat(operation.arguments.values()):
        if isinstance(value, TensorSummary) and value.shape == tuple(output.shape):
            yield from (torch.full_like(output, number) for number in _numbers(value))
    yield torch.ones_like(output)
    yield torch.zeros_like(output)


def _filled(operation: Operation) -> Iterator[dict[str, Any]]:
    """The arguments, with something for each tensor of which only statistics are there."""
    function = operator(operation.op)
    known = dict(operation.arguments)
    summaries = [each for each in flat(known.values()) if isinstance(each, TensorSummary)]
    sides = _SIDES if summaries else _SIDES[:1]
    for side in sides:
        if sum(math.prod(_shape(each, side)) for each in summaries) > _LARGEST:
            return
        for numbers in itertools.product(*map(_numbers, summaries)):
            left = iter(numbers)
            arguments = {name: _with(value, left, side) for name, value in known.items()}
            check_output_size(function, arguments)
            yield arguments


def _with(value: Any, left: Iterator[float], side: int) -> Any:
    if isinstance(value, TensorSummary):
        return torch.full(_shape(value, side), next(left)).to(_dtype(value))
    return [_with(item, left, side) for item in value] if isinstance(value, list) else value


def _shape(summary: TensorSummary, side: int) -> tuple[int, ...]:
    return tuple(min(length, side) for length in summary.shape)


def _numbers(summary: TensorSummary) -> list[float]:
    """Numbers that are in the tensor for certain; the dangerous ones first."""
    counts = {
        0.0: summary.zero_count,
        math.inf: summary.pos_inf_count,
        -math.inf: summary.neg_inf_count,
        math.nan: summary.nan_count,
    }
    special = [number for number, count in counts.items() if count]
    finite = [number for number in (summary.min, summary.max) if number is not None]
    return list(dict.fromkeys([*special, *finite])) or [0.0, 1.0]


def _dtype(summary: TensorSummary) -> torch.dtype:
    try:
        return dtype_named(summary.dtype)
    except ValueError as error:
        name = summary.dtype[:40]
        raise CapsuleError(f"it has a tensor of dtype {name!r}, which is unknown.") from error
