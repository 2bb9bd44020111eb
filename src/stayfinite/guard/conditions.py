"""What an experiment changes of a step: clipping, loss scale, batch, precision, domains."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from stayfinite.detect.finite import all_finite
from stayfinite.detect.hooks import Attachment, together
from stayfinite.domains import HALVES
from stayfinite.explain.experiments import CannotReplayError, Change
from stayfinite.living import has_compiled_module
from stayfinite.locate.loss_terms import only_term
from stayfinite.locate.source import user_place
from stayfinite.nested import children, map_leaves
from stayfinite.records import Origin
from stayfinite.recover.float32 import compute_in
from stayfinite.training import params_of

if TYPE_CHECKING:
    from stayfinite.guard.guard import Guard

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@contextlib.contextmanager
def changed_conditions(
    guard: Guard, change: Change, *, cause: str, origin: Origin, modules: Sequence[nn.Module]
) -> Iterator[None]:
    """A block in which one term alone is differentiated, modules are more precise, and so on.

    CannotReplayError before or after it if the change does not apply to what ran.
    """
    begun = inside = None
    with contextlib.ExitStack() as all_of_them:
        if change.term is not None:
            nodes = only_term(change.term, lambda: guard.past.tracing.nodes)
            begun = all_of_them.enter_context(nodes)
        if change.precision is not None:
            dtype = _higher_dtype(change.precision, origin)
            all_of_them.enter_context(compute_in(modules, dtype))
        if change.is_compiled and not has_compiled_module():
            raise CannotReplayError("nothing is compiled")
        if change.is_guarded:
            inside = all_of_them.enter_context(_kept_inside(cause, origin))
        yield
        if inside is not None and not inside.applied:
            raise CannotReplayError("the operation could not be guarded")
        if begun is not None and len(begun) != 1:
            raise CannotReplayError("there is not one backward pass from a sum")


def _higher_dtype(precision: str, origin: Origin) -> torch.dtype:
    """The type to compute in; CannotReplayError if it is no higher than the one that went bad."""
    dtypes = {each.dtype for each in origin.outputs}
    if precision == "float32" and not dtypes & set(HALVES):
        raise CannotReplayError("it is not in a lower precision")
    return _DTYPES[precision]


def _kept_inside(cause: str, origin: Origin) -> KeptInside:
    """The guard for the operation that went bad; CannotReplayError if there is none."""
    if cause not in KEPT_FOR or origin.file is None or origin.line is None:
        raise CannotReplayError("there is no guard for it")
    inner = origin.facts.get("library")  # the line of a package that ran the operation
    file, line = (inner["file"], inner["line"]) if inner else (origin.file, origin.line)
    return KeptInside(cause, file=file, line=line)


def terms_of(origin: Origin, scaler: Any) -> tuple[str, ...]:
    """The terms of the loss whose backward pass went bad; in a forward pass the values tell."""
    if scaler is not None:  # a term alone would go without its scale
        return ()
    return tuple(name for name, _ in origin.facts.get("term", {}).get("terms", ()))


def clip_updates(optimizers: Iterable[Optimizer], *, max_norm: float) -> Attachment:
    """Have the gradients of every update clipped to this norm, until it is removed."""

    def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(params_of(optimizer), max_norm)

    handles = [optimizer.register_step_pre_hook(clip) for optimizer in optimizers]
    return together(*(Attachment(handle.remove) for handle in handles))


def multiply_scale(scaler: Any, by: float) -> None:
    """Another loss scale from now on."""
    state = scaler.state_dict()
    scaler.load_state_dict({**state, "scale": state["scale"] * by})


Weights = list[tuple[Tensor, Tensor]]
"""Parameters, each with a value for it."""


@torch.no_grad()
def weights_before(
    optimizer: Optimizer, gradients: Sequence[Tensor | None], rates: Sequence[Any]
) -> Weights | None:
    """What the parameters were before the update that was made last, by its rule, but for rounding.

    None for optimizers whose rule does not tell. `gradients` and `rates` are those of the update.
    """
    undo = _UNDONE.get(type(optimizer))
    params = params_of(optimizer)
    if undo is None or len(gradients) != len(params) or len(rates) != len(optimizer.param_groups):
        return None
    given = iter(gradients)
    found: Weights = []
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        for param, gradient in zip(group["params"], given, strict=False):
            if gradient is None:
                continue
            before = undo(param, gradient, optimizer.state[param], {**group, "lr": float(rate)})
            if before is None or not all_finite([before]):
                return None
            found.append((param, before))
    return found


def _before_sgd(param: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor | None:
    rate, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
    if group["maximize"] or rate * decay >= 1:
        return None
    if momentum and not group["nesterov"]:
        moved: Tensor = state["momentum_buffer"]
        return param.add(moved, alpha=rate)
    if gradient is param.grad or gradient._base is not None:  # it may have been written to since
        return None
    if momentum:
        gradient = gradient.add(state["momentum_buffer"], alpha=momentum)
    return param.add(gradient, alpha=rate).div(1 - rate * decay)


def _before_adam(param: Tensor, gradient: Tensor, state: Any, group: Any) -> Tensor | None:
    rate, (beta1, beta2), step = group["lr"], group["betas"], float(state["step"])  # host sync
    decay = rate * group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    if step < 1 or decay >= 1:
        return None
    root = second.sqrt() / (1 - beta2**step) ** 0.5 + group["eps"]
    return param.addcdiv(state["exp_avg"], root, value=rate / (1 - beta1**step)).div(1 - decay)


_UNDONE: dict[type, Callable[[Tensor, Tensor, Any, Any], Tensor | None]] = {
    torch.optim.SGD: _before_sgd,
    torch.optim.Adam: _before_adam,
    torch.optim.AdamW: _before_adam,
}

_LEAVES = (Tensor, np.ndarray)


class Split:
    """A nested batch whose tensors and arrays all have the samples in their first dimension.

    Lists of as many other things, such as captions, go with them; so do lists of samples, as
    detectors take them. `rows` is 0 where that is not so, and `why_not` says why.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        lists = _sample_lists(batch)
        leaves = [] if lists else list(_leaves(batch))
        sizes = {len(each) for each in lists} or {leaf.shape[0] for leaf in leaves if leaf.ndim}
        self._by_lists = bool(lists)
        self.rows = sizes.pop() if len(sizes) == 1 else 0
        self.why_not: str | None = None
        if sizes:
            self.why_not = "its tensors do not agree on how many samples there are"
        elif not self.rows:
            self.why_not = "there is no tensor in it"

    @property
    def values(self) -> int:
        """How many floating-point numbers one row has."""
        if self._by_lists or not self.rows:
            return 0
        return sum(leaf[0].numel() for leaf in self._floats(self._batch))

    def only(self, rows: Sequence[int]) -> Any:
        """The batch with these rows, copied, in this order."""
        if self._by_lists:
            picked = type(self._batch)(_pick(each, rows) for each in self._batch)
            return map_leaves(picked, _copy_of, kinds=_LEAVES)
        return self._taken(self._batch, list(rows))

    def with_values(self, batch: Any, low: int, high: int, donor: int) -> Any:
        """`batch`, of copies, where these values of the first row are those of the donor."""
        given = [leaf[donor].reshape(-1) for leaf in self._floats(self._batch)]
        offset = 0
        for leaf, other in zip(self._floats(batch), given, strict=True):
            start, end = max(low - offset, 0), min(high - offset, other.numel())
            if start < end:
                leaf[0].view(-1)[start:end] = other[start:end]
            offset += other.numel()
        return batch

    def changed(self, change: Change) -> Any:
        """The batch that the change asks for."""
        batch = self._batch
        if change.rows is not None:
            if not self.rows:
                raise CannotReplayError("the batch cannot be split")
            batch = self.only(change.rows)
            if change.replaced is not None and change.donor is not None:
                batch = self.with_values(batch, *change.replaced, change.donor)
        if change.precision is not None:
            batch = in_float64(batch) if change.precision == "float64" else in_float32(batch)
        return batch

    def _floats(self, batch: Any) -> list[Tensor]:
        found = [leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
        return [leaf for leaf in found if leaf.is_floating_point()]

    def _taken(self, value: Any, rows: list[int]) -> Any:
        if isinstance(value, list):
            if self._goes_along(value):
                return _pick(value, rows)
            return type(value)(self._taken(item, rows) for item in value)
        if isinstance(value, dict):  # lists directly in it are cut; what is deeper stays
            value = {
                key: _pick(item, rows)
                if isinstance(item, (list, tuple)) and self._goes_along(item)
                else item
                for key, item in value.items()
            }
        return map_leaves(value, lambda leaf: _rows_of(leaf, rows), kinds=_LEAVES)

    def _goes_along(self, value: Sequence[Any]) -> bool:
        return len(value) == self.rows and not any(_leaves(item) for item in value)


def _copy_of(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf.copy()


def _rows_of(leaf: Any, rows: list[int]) -> Any:
    if not leaf.ndim:
        return _copy_of(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf[rows]
    taken = leaf.detach()[torch.tensor(rows, device=leaf.device)].contiguous()
    return taken.requires_grad_(leaf.requires_grad)


def _pick(value: Any, rows: Sequence[int]) -> Any:
    return type(value)(value[row] for row in rows)


def _sample_lists(batch: Any) -> list[Any]:
    """The lists of a batch that is nothing but lists of samples; empty for others."""
    if not isinstance(batch, (list, tuple)) or hasattr(batch, "_fields") or not batch:
        return []
    is_so = all(isinstance(item, list) and len(item) > 1 for item in batch)
    return list(batch) if is_so and _leaves(batch) else []


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, _LEAVES):
        return [value]
    return [leaf for _, item in children(value) for leaf in _leaves(item)]


def in_float64(batch: Any) -> Any:
    """The batch with its floating-point tensors in float64."""
    return map_leaves(batch, lambda leaf: _in_dtype(leaf, torch.float64))


def in_float32(batch: Any) -> Any:
    """The batch with its 16-bit tensors in float32."""
    return map_leaves(
        batch, lambda leaf: _in_dtype(leaf, torch.float32) if leaf.itemsize == 2 else leaf
    )


def _in_dtype(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    if leaf.is_floating_point():
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)
    return leaf


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


Rules = dict[str, tuple[int, Keep]]
"""By the name of a function: which argument is guarded, and how."""


def _rules(index: int, keep: Keep, *names: str) -> Rules:
    return {name: (index, keep) for name in names}  # noqa: C420  (fromkeys loses the type)


_LOGS = {
    **_rules(0, _positive, "log", "log2", "log10"),
    **_rules(0, lambda t: t.clamp_min(_small(t) - 1.0), "log1p"),
    **_rules(0, lambda t: t.clamp(_small(t), 1.0 - _small(t)), "logit"),
}
_ROOTS = _rules(0, _positive, "sqrt", "rsqrt")
_DIVISIONS = {
    **_rules(1, _not_zero, "div", "true_divide", "__truediv__", "divide"),
    **_rules(0, _not_zero, "reciprocal", "__rtruediv__", "__rdiv__"),
}
_POWERS = _rules(0, _positive, "pow", "__pow__", "float_power")
_EXPONENTIALS = _rules(
    0,
    lambda t: t.clamp_max(8.0 if t.dtype is torch.float16 else 60.0),
    *("exp", "expm1", "cosh", "sinh"),
)
_ANGLES = _rules(
    0,
    lambda t: t.clamp(_small(t) - 1.0, 1.0 - _small(t)),
    *("acos", "asin", "arccos", "arcsin", "atanh", "erfinv"),
)
_SOFTMAXES = _rules(
    0,
    lambda t: t.clamp_min(torch.finfo(t.dtype).min),
    *("softmax", "log_softmax", "logsumexp"),
)

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
        index, keep = self._kept.get(getattr(func, "__name__", ""), (len(args), _positive))
        value = args[index] if index < len(args) else None
        if isinstance(value, Tensor) and value.is_floating_point() and self._is_here():
            self.applied += 1
            args = (*args[:index], keep(value), *args[index + 1 :])
        return func(*args, **(kwargs or {}))

    def _is_here(self) -> bool:
        place = user_place(sys._getframe(2))
        if place is None or place.line != self._line:
            return False
        return os.path.realpath(place.code.co_filename) == self._file
