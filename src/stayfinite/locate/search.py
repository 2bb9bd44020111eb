"""The source of a bad value: a step run again under the tracer, and the first bad batch."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from stayfinite.detect.detector import bad_reports
from stayfinite.detect.finite import all_finite
from stayfinite.errors import ConfigError, InputError
from stayfinite.locate.origin import origin_of
from stayfinite.locate.tracer import Tracer
from stayfinite.nested import named_tensors, own_loss
from stayfinite.records import NaNReport, Origin
from stayfinite.snapshot import Snapshot
from stayfinite.training import require_module

LossFunction = Callable[..., Tensor]


def find_source(
    model: nn.Module, inputs: Any, *, targets: Any = None, loss_fn: LossFunction | None = None
) -> Origin | None:
    """Where one forward and backward pass goes bad first; None when it stays finite.

    `inputs` is a tensor, a tuple of positional or a dict of keyword arguments. Without
    `loss_fn` the model's own loss is used, or the sum of its float outputs. The model, its
    gradients and all random states are as before afterwards.
    """
    require_module(model)
    snapshot = Snapshot([model])
    try:
        return first_origin(
            [model], lambda: loss_of(call(model, inputs), targets, loss_fn), folder=os.getcwd()
        )
    finally:
        snapshot.restore()


def first_origin(
    modules: Sequence[nn.Module], run: Callable[[], Tensor], *, folder: str | None
) -> Origin | None:
    """Where the loss that `run` gives, or its backward pass, goes bad first; None if it does not.

    Gradients of the modules are left as they come.
    """
    tracer = Tracer()
    with observable(), tracer:
        for module in modules:
            module.zero_grad(set_to_none=True)
        bad = bad_values(run(), modules, tracer)
        found = origin_of(tracer.events_of(bad), folder=folder) if bad else None
    return found[0] if found else None


@contextlib.contextmanager
def observable() -> Iterator[None]:
    """A time for a pass of our own: with gradients, nothing compiled, no warning about our hooks.

    Nothing is seen inside compiled code. Asking torch not to compile loads the compiler, which
    takes seconds, so it is asked only if that is there.
    """
    eager: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:
        eager = torch.compiler.set_stance("force_eager")
    with warnings.catch_warnings(), eager, torch.enable_grad():
        ignore_hooks()
        yield


def ignore_hooks() -> None:
    """No warning about global hooks around a compiled module."""
    warnings.filterwarnings("ignore", message=".*when there are global hooks on")


def bad_values(
    loss: Tensor, modules: Iterable[nn.Module], tracer: Tracer | None = None
) -> list[Tensor]:
    """The loss if it is not finite, else the gradients that are not, after a backward pass."""
    paused = contextlib.nullcontext if tracer is None else tracer.paused
    with paused():
        if not all_finite([loss]):
            return [loss]
    if loss.requires_grad:
        loss.backward()
    params = (param for module in modules for param in module.parameters())
    with paused():
        return [p.grad for p in params if p.grad is not None and not all_finite([p.grad])]


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
    own = own_loss(output)
    if own is not None:
        return own.sum()
    floats = [t for _, t in named_tensors(output, "output") if t.is_floating_point()]
    if not floats:
        raise InputError(
            f"the model returned a {type(output).__name__} without a float tensor; "
            "pass loss_fn to say what is to be finite."
        )
    return torch.stack([tensor.sum().float() for tensor in floats]).sum()


_MOST_JOINED = 16  # batches in one pass, and in memory at once
_SAME = 1e-4  # by how much a loss may differ in one pass or in two: rounding, and no more


class _IndexAndBatch(NamedTuple):
    index: int | None  # type: ignore[assignment]  # instead of the method of a tuple
    batch: Any


class BadBatch(_IndexAndBatch):
    """`(index, batch)` of the first batch that gives a non-finite loss or gradient.

    It is `(None, None)`, and false, when there is none. `reason` is a sentence; `reports` are
    about the batch itself and are empty when its values are finite; `origin` is the operation at
    which it went wrong. `looked_at` is the number of batches that were tried, in `passes` runs
    of the model.

    >>> index, batch = BadBatch(4, torch.zeros(1), reason="inputs holds NaN")
    >>> index
    4
    """

    reason: str
    reports: tuple[NaNReport, ...]
    origin: Origin | None
    looked_at: int
    passes: int

    def __new__(
        cls,
        index: int | None,
        batch: Any,
        *,
        reason: str = "",
        reports: tuple[NaNReport, ...] = (),
        origin: Origin | None = None,
        looked_at: int = 0,
        passes: int = 0,
    ) -> Self:
        found = super().__new__(cls, index, batch)
        found.reason, found.reports, found.origin = reason, reports, origin
        found.looked_at, found.passes = looked_at, passes
        return found

    def __bool__(self) -> bool:
        return self.index is not None

    def __repr__(self) -> str:
        return f"BadBatch(index={self.index}, reason={self.reason!r}, looked_at={self.looked_at})"


def find_first_bad_batch(
    model: nn.Module,
    dataloader: Iterable[Any],
    num_batches: int | None = 100,
    *,
    loss_fn: LossFunction | None = None,
) -> BadBatch:
    """`(index, batch)` of the first batch with a non-finite loss or gradient, or `(None, None)`.

    A batch is (inputs, targets) for `loss_fn(model(inputs), targets)`; without `loss_fn` it is
    what the model itself turns into a loss. `num_batches` None looks at all. Each batch is tried
    on the same weights, and the model, its gradients and the random states are as before
    afterwards.

    Up to 16 batches go through the model in one pass, and a bad pass is halved until its first
    bad batch is found and has been confirmed alone. That is done only where two batches give the
    same loss together as apart; with dropout, batch norm in training or batches of different
    shapes, each is tried alone.

    >>> loader = [(torch.ones(2, 3), torch.ones(2, 1)) for _ in range(5)]
    >>> loader[3][0][1, 2] = float("nan")
    >>> bad = find_first_bad_batch(nn.Linear(3, 1), loader, loss_fn=nn.functional.mse_loss)
    >>> bad.index, bad.reports[0].location
    (3, 'inputs.0')
    """
    require_module(model)
    is_whole = isinstance(num_batches, int) and not isinstance(num_batches, bool)
    if num_batches is not None and not (is_whole and num_batches >= 1):
        by_name = " Give the loss function by name, loss_fn=..." if callable(num_batches) else ""
        raise ConfigError(
            f"num_batches is {num_batches!r}; it must be a whole number of at least 1, or None "
            f"for all batches.{by_name}"
        )
    search = _Search(model, loss_fn)
    looked_at = 0
    try:
        stream = iter(islice(_with_progress(dataloader, num_batches), num_batches))
        while batches := list(islice(stream, search.size)):
            number = search.first_bad(batches)
            before, looked_at = looked_at, looked_at + len(batches)
            if number is not None:
                reason, reports, origin = _reason(batches[number], model, loss_fn)
                return BadBatch(
                    before + number,
                    batches[number],
                    reason=reason,
                    reports=reports,
                    origin=origin,
                    looked_at=looked_at,
                    passes=search.passes,
                )
    finally:
        search.before.restore()
    reason = f"{looked_at} batches were looked at, and all are finite"
    return BadBatch(None, None, reason=reason, looked_at=looked_at, passes=search.passes)


class _Search:
    """Tries batches on one model, several in a pass where that shows the same.

    A batch may be bad only by itself, as one of a single sample is in a variance; so passes are
    shared only after two batches were seen to give the same loss together as apart, and only by
    batches of the same shapes.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None) -> None:
        self.size = 1  # so many batches are wanted next
        self.passes = 0
        self._model, self._loss_fn = model, loss_fn
        self.before = Snapshot([model])
        self._reduction: Literal["mean", "sum"] | None = None  # of the loss of joined batches
        self._may_join = True
        self._last: tuple[Any, float] | None = None  # a good batch, and its loss

    def first_bad(self, batches: Sequence[Any]) -> int | None:
        """The number of the first bad one of these; None when all are good."""
        are_good = self._are_good(batches) if len(batches) > 1 else None
        if are_good:
            self.size = min(2 * self.size, _MOST_JOINED)
            return None
        if are_good is None:
            return self._first_bad_alone(batches)
        low, high, is_left = 0, len(batches), False
        while high - low > 1:
            middle = (low + high) // 2
            is_left = not self._are_good(batches[low:middle])
            low, high = (low, middle) if is_left else (middle, high)
        if is_left or self._loss(batches[low]) is None:  # a last left half was one batch alone
            return low
        self._join_no_more()  # together they are bad, and this one alone is not
        return self._first_bad_alone(batches)

    def _first_bad_alone(self, batches: Sequence[Any]) -> int | None:
        for number, batch in enumerate(batches):
            loss = self._loss(batch)
            if loss is None:
                return number
            if self._may_join and self._reduction is None and self._last is not None:
                self._try_together(*self._last, batch, loss)
            self._last = batch, loss
        return None

    def _are_good(self, batches: Sequence[Any]) -> bool | None:
        """Whether a pass with all of them is finite; None where they cannot share one."""
        batch = _one_batch(batches) if len(batches) > 1 else batches[0]
        if batch is None:
            return None
        weight = len(batches) if self._reduction == "mean" else 1  # gradients as large as alone
        try:
            return self._loss(batch, weight=weight) is not None
        except Exception:  # too large for the memory, or of one size only
            if len(batches) == 1:
                raise
            self._join_no_more()
            return None

    def _try_together(self, one: Any, first: float, other: Any, second: float) -> None:
        """See whether the loss of two batches in one pass tells of each of them."""
        if math.isclose(first, second, rel_tol=10 * _SAME):
            return  # what depends on the whole batch would not show
        both = _one_batch([one, other])
        if both is None:
            return
        try:
            loss = self._loss(both)
        except Exception:
            loss = None
        known: tuple[tuple[Literal["mean", "sum"], float], ...] = (
            ("mean", (first + second) / 2),
            ("sum", first + second),
        )
        for reduction, expected in known:
            if loss is not None and math.isclose(loss, expected, rel_tol=_SAME):
                self._reduction, self.size = reduction, 2
                return
        self._join_no_more()

    def _join_no_more(self) -> None:
        self._may_join, self._reduction, self.size = False, None, 1

    def _loss(self, batch: Any, *, weight: float = 1.0) -> float | None:
        """The loss of a pass; None when it or a gradient is not finite."""
        self.passes += 1
        inputs, targets = inputs_and_targets(batch, self._loss_fn)
        try:
            with torch.enable_grad():
                self._model.zero_grad(set_to_none=True)
                loss = loss_of(call(self._model, inputs), targets, self._loss_fn)
                loss = loss if weight == 1.0 else loss * weight
                bad = bad_values(loss, [self._model])
        finally:
            self.before.restore()
        return None if bad else float(loss.detach())


def _one_batch(batches: Sequence[Any]) -> Any:
    """One batch with the samples of all; None unless they have the same shapes."""
    flat = [tree_flatten(batch) for batch in batches]
    first, form = flat[0]
    rows = {leaf.shape[0] if leaf.dim() else 0 for leaf in first if isinstance(leaf, Tensor)}
    if len(rows) != 1 or rows == {0} or any(other != form for _, other in flat[1:]):
        return None
    leaves = []
    for same in zip(*(leaves for leaves, _ in flat), strict=True):
        if not all(_fits(each, same[0]) for each in same):
            return None
        leaves.append(torch.cat(same) if isinstance(same[0], Tensor) else same[0])
    return tree_unflatten(leaves, form)


def _fits(leaf: Any, other: Any) -> bool:
    """Whether two leaves can be joined: tensors of one form, or else the same plain value."""
    if isinstance(other, Tensor):
        return type(leaf) is type(other) and (leaf.shape, leaf.dtype, leaf.device, leaf.layout) == (
            other.shape,
            other.dtype,
            other.device,
            torch.strided,
        )
    if leaf is other:
        return True
    # An array does not compare to a plain answer.
    return isinstance(leaf, (str, int, float)) and type(leaf) is type(other) and leaf == other


def _with_progress(loader: Iterable[Any], total: int | None) -> Iterable[Any]:
    # Here, where random states are put back: importing rich draws a random number.
    from rich.console import Console
    from rich.progress import track

    console = Console(file=sys.stderr)
    lengths = [total] if total is not None else []
    lengths += [len(loader)] if isinstance(loader, Sized) else []
    return track(
        loader,
        "looking for a bad batch",
        total=min(lengths, default=None),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def inputs_and_targets(batch: Any, loss_fn: LossFunction | None) -> tuple[Any, Any]:
    """The two of a batch; all of it is inputs where there is nothing to compare them with."""
    if loss_fn is not None and isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, None


def _reason(
    batch: Any, model: nn.Module, loss_fn: LossFunction | None
) -> tuple[str, tuple[NaNReport, ...], Origin | None]:
    """Why a bad batch is bad, in a sentence; what is bad in itself; and where it goes wrong."""
    inputs, targets = inputs_and_targets(batch, loss_fn)
    origin = find_source(model, inputs, targets=targets, loss_fn=loss_fn)
    reports = tuple(bad_reports(named_tensors(batch, "inputs")))
    if reports:
        reason = f"{reports[0].location} holds {reports[0].nan_type.word}"
    elif origin is not None and origin.line is not None:
        reason = f"{origin.op or origin.phase} at {origin.file}:{origin.line} is not finite"
    else:
        reason = "its loss or a gradient is not finite"
    return reason, reports, origin
