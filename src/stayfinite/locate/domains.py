"""Operations of one line, kept inside their domains while a block runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stayfinite.locate.source import user_place

Keep = Callable[[Tensor], Tensor]
_HALF = (torch.float16, torch.bfloat16)


def _small(tensor: Tensor) -> float:
    return 1e-3 if tensor.dtype in _HALF else 1e-6


def _positive(tensor: Tensor) -> Tensor:
    return tensor.clamp_min(_small(tensor))


def _not_zero(tensor: Tensor) -> Tensor:
    small = _small(tensor)
    away = torch.where(tensor < 0, -small, small).to(tensor.dtype)
    return torch.where(tensor.detach().abs() < small, away, tensor)


def _above_minus_one(tensor: Tensor) -> Tensor:
    return tensor.clamp_min(_small(tensor) - 1.0)


def _inside_zero_and_one(tensor: Tensor) -> Tensor:
    return tensor.clamp(_small(tensor), 1.0 - _small(tensor))


def _below_overflow(tensor: Tensor) -> Tensor:
    return tensor.clamp_max(8.0 if tensor.dtype is torch.float16 else 60.0)


def _inside_one(tensor: Tensor) -> Tensor:
    edge = 1.0 - _small(tensor)
    return tensor.clamp(-edge, edge)


def _above_minus_inf(tensor: Tensor) -> Tensor:
    return tensor.clamp_min(torch.finfo(tensor.dtype).min)


Rules = dict[str, tuple[int, Keep]]
"""By the name of a function: which argument is guarded, and how."""


def _rules(index: int, keep: Keep, *names: str) -> Rules:
    return {name: (index, keep) for name in names}  # noqa: C420  (fromkeys loses the type)


_LOGS = {
    **_rules(0, _positive, "log", "log2", "log10"),
    **_rules(0, _above_minus_one, "log1p"),
    **_rules(0, _inside_zero_and_one, "logit"),
}
_ROOTS = _rules(0, _positive, "sqrt", "rsqrt")
_DIVISIONS = {
    **_rules(1, _not_zero, "div", "true_divide", "__truediv__", "divide"),
    **_rules(0, _not_zero, "reciprocal", "__rtruediv__", "__rdiv__"),
}
_POWERS = _rules(0, _positive, "pow", "__pow__", "float_power")
_EXPONENTIALS = _rules(0, _below_overflow, "exp", "expm1", "cosh", "sinh")
_ANGLES = _rules(0, _inside_one, "acos", "asin", "arccos", "arcsin", "atanh", "erfinv")
_SOFTMAXES = _rules(0, _above_minus_inf, "softmax", "log_softmax", "logsumexp")

KEPT_FOR: dict[str, Rules] = {
    "log_of_zero": _LOGS,
    "log_of_negative": _LOGS,
    "gumbel_log_zero": _LOGS,
    "kl_of_zero": {**_LOGS, **_DIVISIONS},
    "sqrt_of_negative": _ROOTS,
    "sqrt_grad_at_zero": _ROOTS,
    "division_by_zero": _DIVISIONS,
    "cosine_zero_vector": _DIVISIONS,
    "pow_of_negative": _POWERS,
    "pow_grad_at_zero": _POWERS,
    "exp_overflow": _EXPONENTIALS,
    "acos_domain": _ANGLES,
    "softmax_all_masked": _SOFTMAXES,
}
"""By cause: the functions that its fix guards."""


class KeptInside(TorchFunctionMode):
    """While active, the functions that belong to the cause are guarded on one line of a file.

    `applied` counts how often that was done.
    """

    def __init__(self, cause: str, *, file: str, line: int) -> None:
        super().__init__()
        self._kept = KEPT_FOR[cause]
        self._file, self._line = os.path.realpath(file), line
        self.applied = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        rule = self._kept.get(getattr(func, "__name__", ""))
        if rule is not None and self._is_here():
            args = self._guarded(args, *rule)
        return func(*args, **(kwargs or {}))

    def _is_here(self) -> bool:
        place = user_place(sys._getframe(2))
        if place is None or place.line != self._line:
            return False
        return os.path.realpath(place.code.co_filename) == self._file

    def _guarded(self, args: tuple[Any, ...], index: int, keep: Keep) -> tuple[Any, ...]:
        if index >= len(args) or not isinstance(args[index], Tensor):
            return args
        if not args[index].is_floating_point():
            return args
        self.applied += 1
        return (*args[:index], keep(args[index]), *args[index + 1 :])
