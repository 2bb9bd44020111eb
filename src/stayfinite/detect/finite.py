"""Is everything finite? Questions over lists of tensors, answered on their device."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey, _AutoDispatchBelowAutograd, _len_torch_dispatch_stack
from torch._C import _dispatch_tls_is_dispatch_key_excluded as _is_excluded
from torch._C import _dispatch_tls_set_dispatch_key_excluded as _exclude
from torch.optim.optimizer import _global_optimizer_pre_hooks

from stayfinite.detect.memory import compact, float_parts, pieces, undisturbed, unwrap
from stayfinite.records import NaNType

SMALL = 1 << 16
"""Up to so many elements the fused check over a list beats one sum for each tensor."""

# Up to so many the fused check beats a sum in the middle of a step, though not in a loop of its
# own: a sum that starts a second thread finds it asleep.
_SMALL_PLAN = 1 << 18

# A sum is the fastest pure read of these; it may overflow, so its alarm is confirmed.
# fp16 sums overflow too easily. On the CPU the norm of other types is many times slower.
_SUMMABLE = {torch.float32, torch.float64, torch.bfloat16}
# The fused check writes back what it read; for 16-bit floats it changes the payload of a NaN.
_FUSABLE = {torch.float32, torch.float64}
_NATIVE = _SUMMABLE | {torch.float16}
# Cloning is the fastest way to a new 0-d tensor.
_ZERO = undisturbed(torch.zeros)((), device="cpu")
_ONE = undisturbed(torch.ones)((), device="cpu")
_CPU = torch.device("cpu")
_PLAIN = {Tensor, nn.Parameter}
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_AUTOGRAD = DispatchKey.AutogradFunctionality
# Private, but what GradScaler itself calls: one pass over a whole list of tensors.
_check = torch._amp_foreach_non_finite_check_and_unscale_
# Tensor.item, which may be wrapped to see what the script reads.
_item = torch._C.TensorBase.item


@undisturbed
def nonfinite(
    tensors: Iterable[Any], *, writable: bool = False, exact_on_device: bool = False
) -> Tensor:
    """A 0-d bool tensor: does any tensor hold a NaN or an Inf?

    It is on the device of the tensors; of several, on the first that is not the CPU. None and
    other non-tensors are ignored, and no temporary is as large as an input. On the CPU there may
    be one host read; elsewhere, and with `exact_on_device`, there is none. `writable` says that
    the caller owns the memory (gradients): it allows a faster check that writes every byte back
    unchanged.

    >>> nonfinite([torch.ones(3), None, torch.tensor(float("nan"))])
    tensor(True)
    """
    flags = _flags(tensors, writable, exact_on_device)
    return _any_of(flags) if flags else torch.zeros((), dtype=torch.bool, device="cpu")


@undisturbed
def all_finite(tensors: Iterable[Any], *, writable: bool = False) -> bool:
    """Whether no tensor holds a NaN or an Inf; costs at most one host read when they do not.

    >>> all_finite([torch.ones(3), None, torch.tensor([1, 2])])
    True
    """
    flags = _flags(tensors, writable, exact=False)
    return not flags or not bool(flags[0] if len(flags) == 1 else _any_of(flags))  # host sync


@undisturbed
def classify(tensor: Tensor) -> NaNType:
    """The worst kind of non-finite value in the tensor: NAN before POS_INF before NEG_INF."""
    found = _all_extremes(tensor)
    values = torch.stack(found).tolist() if found else []  # host sync
    if any(value != value for value in values):
        return NaNType.NAN
    if float("inf") in values:
        return NaNType.POS_INF
    return NaNType.NEG_INF if float("-inf") in values else NaNType.NONE


@undisturbed
def largest(tensor: Tensor) -> float:
    """The largest magnitude in the tensor: NaN where there is one, 0 where nothing can be read."""
    found = _all_extremes(tensor)
    return float(torch.stack(found).abs().max()) if found else 0.0  # host sync


def _flags(tensors: Iterable[Any], writable: bool, exact: bool) -> list[Tensor]:
    """0-d tensors, non-zero where something is bad; none when all is known to be finite."""
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    ours = [t for t in tensors if _is_fusable(t)] if writable else []
    found: Tensor | None = None
    if ours:
        try:
            found = _ZERO.clone()
            _check(ours, found, _ONE)
        except RuntimeError:  # expanded, nested, or another layout it cannot write to
            found = None
    if found is not None:
        if len(ours) == len(tensors):
            return [found]
        tensors = [t for t in tensors if not _is_fusable(t)]
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        for part in float_parts(tensor):
            by_device.setdefault(part.device, []).append(part)
    if not exact and not _cpu_alarm(by_device.get(_CPU, []), found):
        by_device.pop(_CPU, None)
        found = None
    flags = [_exact_flag(parts) for parts in by_device.values()]
    return flags if found is None else [found, *flags]


def _is_fusable(tensor: Any) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.dtype in _FUSABLE
        and tensor.is_cpu
        and tensor.numel() <= SMALL
        and tensor.layout is torch.strided
        and not tensor.requires_grad
    )


def _cpu_alarm(parts: list[Tensor], found: Tensor | None) -> bool:
    """The fast test: never misses, but finite values may overflow a sum."""
    values: list[Tensor] = []
    for part in parts:
        if part.dtype in _SUMMABLE:
            # A lazily negated tensor would be copied; the sign does not matter here.
            values.append(compact(part._neg_view() if part.is_neg() else part).sum())
        else:
            values += _extremes(part)
    if not values:
        return found is not None and bool(found)  # host sync
    total = values[0] if len(values) == 1 else torch.stack(values).sum(dtype=torch.float64)
    suspect = total - total  # NaN unless the total is finite
    return bool(suspect if found is None else suspect + found)  # host sync


def _exact_flag(parts: list[Tensor]) -> Tensor:
    together = [part for part in parts if part.is_cuda and _is_direct(part)]
    alone = [part for part in parts if not (part.is_cuda and _is_direct(part))]
    values = _largest(together) + [value for part in alone for value in _extremes(part)]
    return torch.stack(values).isfinite().all().logical_not()


def _largest(parts: list[Tensor]) -> list[Tensor]:
    """The largest magnitude of each, NaN where there is one; one kernel for each dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        by_dtype.setdefault(part.dtype, []).append(part)
    groups = by_dtype.values()
    return [value for group in groups for value in torch._foreach_norm(group, math.inf)]


def _all_extremes(tensor: Tensor) -> list[Tensor]:
    return [value for part in float_parts(tensor) for value in _extremes(part)]


def _is_direct(part: Tensor) -> bool:
    """Whether torch reduces it without a copy."""
    return part.is_contiguous() and part.dtype in _NATIVE and not part.is_neg()


def _extremes(part: Tensor) -> Iterator[Tensor]:
    """Smallest and largest element; NaN where there is one. By pieces where torch would copy."""
    packed = compact(part)
    if _is_direct(packed):
        yield from packed.aminmax()
        return
    dtype = packed.dtype if packed.dtype in _NATIVE else torch.float32
    for _, piece in pieces(packed):
        yield from piece.to(dtype).aminmax()


def _any_of(flags: list[Tensor]) -> Tensor:
    # The CPU last: bringing a flag to it would wait for the other device.
    flags = sorted(flags, key=lambda flag: flag.is_cpu)
    flag = flags[0].bool()
    for other in flags[1:]:
        flag = flag.logical_or(other.to(flag.device))
    return flag


class _Plan:
    """How to look at the tensors of one owner, as they were when they were last looked over.

    A plan that no longer fits costs time, or torch refuses the call; it never hides a bad value.
    """

    __slots__ = ("bits", "count", "found", "large", "one")

    def __init__(self, tensors: list[Tensor]) -> None:
        self.count = len(tensors) if all(map(_fits, tensors)) else -1
        self.large = [i for i, tensor in enumerate(tensors) if tensor.numel() > _SMALL_PLAN]
        self.found = torch.zeros((), device="cpu")  # stays 0 as long as all goes well
        # The bits of `found`, in the same memory: cheaper to read than by item().
        self.bits = self.found.view(1).numpy().data.cast("B").cast("i")
        self.one = torch.ones((), device="cpu")


def _fits(tensor: Tensor) -> bool:
    # In shared memory, what another process writes at the same time would be lost.
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.dtype in _FUSABLE
        and tensor.layout is torch.strided
        and not tensor.is_shared()
    )


_plans: dict[int, _Plan] = {}


def surely_finite(tensors: list[Tensor], *, of: object) -> bool:
    """True when all are finite; False: not known, ask `scan`. There is one read of CPU memory.

    The memory must be the caller's: the bytes are written back unchanged. Always the same kind
    of tensors, such as all gradients of an optimizer, must be asked for under one owner, `of`.
    """
    plan = _plans.get(id(of))
    if plan is None or plan.count != len(tensors):
        if len(_plans) > 1000:  # of owners that are long gone
            _plans.clear()
        plan = _plans[id(of)] = _Plan(tensors)
    if plan.count < 1 or type(tensors[0]) not in _PLAIN:
        return False
    if _len_torch_dispatch_stack() and torch._C._get_dispatch_mode(_FAKE) is not None:
        return False
    try:
        _check_below_autograd(tensors, plan)
        if not plan.bits[0]:
            return True
    except (RuntimeError, TypeError):  # sparse, expanded, a subclass, on another device
        pass
    del _plans[id(of)]
    return False


def _check_below_autograd(tensors: list[Tensor], plan: _Plan) -> None:
    """No graph is made, no version counter moves; torch's own guard for it takes twice as long."""
    if _is_excluded(_AUTOGRAD):
        raise RuntimeError("somebody else's guard is there already")
    _exclude(_AUTOGRAD, True)
    try:
        if plan.large:  # a bad value makes a bad sum
            sums = torch.stack([tensors[i].sum() for i in plan.large])
            large = set(plan.large)
            tensors = [sums, *(tensor for i, tensor in enumerate(tensors) if i not in large)]
        _check(tensors, plan.found, plan.one)
    finally:
        _exclude(_AUTOGRAD, False)


def finite_norm(gradients: list[Tensor]) -> float | None:
    """The norm over all gradients when it comes almost for free and is finite; else None.

    None says nothing: squares overflow, and sparse, fp16 or far-away gradients are not tried.
    """
    first = gradients[0] if gradients else None
    if type(first) is not Tensor or not first.is_cpu or first.dtype not in _SUMMABLE:
        return None
    try:
        with _AutoDispatchBelowAutograd():
            norms = torch.stack(torch._foreach_norm(gradients))
            total = torch.linalg.vector_norm(norms, dtype=torch.float64).item()
    except (RuntimeError, NotImplementedError):  # sparse, or of several types or devices
        return None
    return total if math.isfinite(total) else None


def finite_number(loss: Tensor) -> float | None:
    """The value of a loss on the CPU if it is finite; None says nothing."""
    loss = unwrap(loss)
    if type(loss) is not Tensor or not loss.is_cpu or loss.numel() != 1:
        return None
    value = _item(loss)
    return value if isinstance(value, float) and math.isfinite(value) else None


_PROBES = 16


class _Note:
    """The large gradients among some that were finite, and what shows that they still are.

    A write through `.data` or NumPy, an all-reduce and a GradScaler move no version counter, so
    some elements of each are compared as well.
    """

    __slots__ = ("_count", "_gradients", "_marks", "_probes", "norm")

    def __init__(self, gradients: Sequence[Tensor], norm: float) -> None:
        large = [gradient for gradient in gradients if gradient.numel() > SMALL]
        self.norm, self._count = norm, len(gradients)
        self._gradients = [weakref.ref(gradient) for gradient in large]
        self._marks = [_mark(gradient) for gradient in large]
        self._probes = _probes(large)

    @undisturbed
    def fits(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these are the same gradients, unchanged, but for the small ones."""
        large = [gradient for ref in self._gradients if (gradient := ref()) is not None]
        now = {id(gradient) for gradient in gradients if gradient.numel() > SMALL}
        return (
            len(gradients) == self._count
            and now == {id(gradient) for gradient in large}
            and self._marks == [_mark(gradient) for gradient in large]
            and torch.equal(self._probes, _probes(large))
        )


def _mark(gradient: Tensor) -> tuple[int, int]:
    return gradient._version, gradient.data_ptr()


def _probes(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([g.view(-1)[:: g.numel() // _PROBES].double() for g in gradients])


_last: _Note | None = None


@undisturbed
def note_finite(gradients: Sequence[Tensor], norm: float) -> None:
    """All these gradients are finite now, and this is their norm.

    Nothing is kept where nobody watches optimizers, or where reading again costs no more.
    """
    global _last
    _last = None
    is_worth_it = _global_optimizer_pre_hooks and any(g.numel() > SMALL for g in gradients)
    if is_worth_it and math.isfinite(norm) and all(map(_can_be_known, gradients)):
        _last = _Note(gradients, norm)


def known_norm(gradients: Sequence[Tensor]) -> float | None:
    """The norm of exactly these gradients, if they are still as clipping left them; else None.

    It is told once. Small gradients are read again; of a large one, an element that was changed
    by something that torch does not count is noticed only if it is one of sixteen.
    """
    global _last
    note, _last = _last, None
    if note is None or not note.fits(gradients):
        return None
    small = [gradient for gradient in gradients if gradient.numel() <= SMALL]
    return note.norm if all_finite(small, writable=True) else None


def _can_be_known(gradient: Tensor) -> bool:
    """Whether it is ordinary; the memory of a small one does not matter."""
    return (
        type(gradient) is Tensor
        and gradient.is_cpu
        and gradient.layout is torch.strided
        and not gradient.is_inference()
        and (gradient.numel() <= SMALL or gradient.is_contiguous())
    )
