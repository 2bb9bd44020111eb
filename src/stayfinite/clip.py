"""Clipping that survives what it is there for: NaN, Inf, and gradients too large to be squared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.optim import Optimizer

from stayfinite.detect.finite import all_finite, note_finite
from stayfinite.detect.memory import compact, pieces, plain_parts
from stayfinite.errors import ConfigError, InputError
from stayfinite.nested import Named
from stayfinite.settings import require_choice
from stayfinite.training import params_of

Drop = Literal["elements", "tensors", "nothing"]
Target = nn.Module | Optimizer | Tensor | Iterable[Tensor]

WIDENED = 1 << 20
"""Elements that are widened together."""

_SHORT = 1 << 13  # elements that are widened and added up; more are by rows
_ROW = 512
_HALF = {torch.float16, torch.bfloat16}
# For other powers, and for smaller norms of these, a term may underflow.
_QUICK_POWERS = {1.0, 2.0, math.inf}
_SAFE_NORM = 1e-15


@torch.no_grad()
def clip_gradients(
    target: Target,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    drop: Drop = "elements",
    names: Iterable[str] | None = None,
) -> ClipResult:
    """Scale all gradients together, in place, so that their norm is at most `max_norm`.

    The target is a module, an optimizer, a parameter or several. NaN and Inf are set to 0 first,
    or with drop="tensors" each whole gradient that has one; the norm is that of the rest, and
    `max_norm` inf drops without clipping. With drop="nothing", gradients with something bad in
    them stay as they are, all of them, for whatever checks them next. Gradients are named as in
    the module or the optimizer, by `names` (one for each parameter), or else by their number.
    Costs one pass and one host read when there is nothing to do.

    Of DTensors the norm is that of all ranks, which scale by the same factor and must all call it:
    one small all-reduce for each dimension of the mesh, four more when something is bad.

    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> weight.grad = torch.tensor([3e38, float("nan"), 4e30])
    >>> clip_gradients(weight, 1.0, names=["weight"]).dropped
    ('weight',)
    >>> weight.grad
    tensor([1.0000e+00, 0.0000e+00, 1.3333e-08])
    """
    if not max_norm > 0:
        raise ConfigError(
            f"max_norm is {max_norm}; it must be greater than 0. "
            "To drop bad values without clipping, use inf."
        )
    if not norm_type >= 1:
        raise ConfigError(f"norm_type is {norm_type}; it must be at least 1, or inf.")
    check_drop(drop)
    gradients = gradients_in(target, None if names is None else list(names))
    return clip_whole(gradients, lambda norm, is_sound: max_norm, norm_type=norm_type, drop=drop)


def check_drop(drop: str) -> None:
    """ConfigError unless it is one of the choices."""
    require_choice("drop", drop, get_args(Drop))


def clip_whole(
    gradients: Gradients,
    allowed: Callable[[float, bool], float],
    *,
    norm_type: float = 2.0,
    drop: Drop,
) -> ClipResult:
    """Scale all gradients together to what is `allowed` for their norm, which is asked once.

    It gets the norm, and whether it is of sound gradients, of which nothing was dropped.
    """
    parts = [part for gradient in gradients for part in gradient.memory]
    quick, true = (quick_norm, true_norm)
    if gradients.mesh is not None:
        quick, true = gradients.quick_norm, gradients.true_norm
    norm, dropped = quick(parts, norm_type), dict[str, int]()
    if norm is None:
        found = drop_bad(gradients, drop)
        if found is None:
            return untouched_result(gradients)
        norm, dropped = true(parts, norm_type), found
    max_norm = allowed(float(norm), not dropped)
    if norm > max_norm:
        scale_down(parts, norm, max_norm)
    return result_of(gradients, norm, min(norm, max_norm), dropped, max_norm=max_norm)


@dataclass(frozen=True, kw_only=True)
class ClipResult:
    """What clipping found and did.

    `norm` is the true norm of the finite rest before it was clipped; float(result) gives it. It
    is NaN where drop="nothing" has left bad gradients as they were. `max_norm` is the norm that
    was allowed, inf where each tensor or each unit has a limit of its own; then `clipped` names
    the tensors that were scaled. `dropped` names the tensors in which something was not finite
    and was set to 0.

    >>> result = ClipResult(norm=12.5, was_clipped=True, max_norm=1.0)
    >>> float(result)
    12.5
    """

    norm: float
    was_clipped: bool
    dropped: tuple[str, ...] = ()
    dropped_elements: int = 0
    kept_elements: int = 0
    max_norm: float = math.inf
    clipped: tuple[str, ...] = ()

    def __float__(self) -> float:
        return self.norm


def result_of(
    gradients: Gradients,
    norm: float,
    after: float,
    dropped: Mapping[str, int],
    *,
    max_norm: float = math.inf,
    clipped: Sequence[str] = (),
) -> ClipResult:
    """What was done, from the norm before and after, and what was dropped of which gradient."""
    note_finite([gradient.tensor for gradient in gradients], after)
    count = sum(dropped.values())
    return ClipResult(
        norm=float(norm),
        was_clipped=norm > max_norm or bool(clipped),
        dropped=tuple(dropped),
        dropped_elements=count,
        kept_elements=_elements(gradients) - count,
        max_norm=max_norm,
        clipped=tuple(clipped),
    )


def untouched_result(gradients: Gradients) -> ClipResult:
    """The result where something is bad, and nothing may be dropped."""
    return ClipResult(norm=math.nan, was_clipped=False, kept_elements=_elements(gradients))


def _elements(gradients: Gradients) -> int:
    if gradients.mesh is not None:
        return sum(gradient.tensor.numel() for gradient in gradients)  # of all ranks
    return sum(part.numel() for gradient in gradients for part in gradient.memory)


class Gradient(NamedTuple):
    """A gradient, its parameter, and dense views of all that is in it, to be read and written.

    Of a DTensor the memory is this rank's, one of so many `shards`; `slot` is the number of the
    parameter, the same on every rank.
    """

    name: str
    param: Tensor
    tensor: Tensor
    memory: list[Tensor]
    slot: int = 0
    shards: int = 1


def gradients_in(target: Target, names: Sequence[str] | None = None) -> Gradients:
    """Each gradient once, by the name of its parameter."""
    if isinstance(target, nn.Module) and names is None:
        params: Iterable[Named] = target.named_parameters()
    else:
        if isinstance(target, Optimizer) and names is None:
            names = [name for group in target.param_groups for name in group.get("param_names", ())]
        listed = list_parameters(target)
        params = zip(names or map(str, range(len(listed))), listed, strict=True)
    found: dict[int, Gradient] = {}
    meshes: list[Any] = []
    slot = -1
    for slot, (name, param) in enumerate(params):
        shards = 1
        is_sharded = type(param) is not nn.Parameter and hasattr(type(param), "device_mesh")
        if is_sharded:
            shards = _count_shards(param)
            meshes.append(param.device_mesh)  # type: ignore[attr-defined]
        if (gradient := param.grad) is None:
            continue
        if is_sharded and gradient.placements != param.placements:  # type: ignore[attr-defined]
            # Sums that are still to be added up between ranks; the optimizer would do the same.
            gradient = param.grad = gradient.redistribute(placements=param.placements)  # type: ignore[attr-defined]
        if gradient.layout is torch.sparse_coo and not gradient.is_coalesced():
            gradient.copy_(gradient.coalesce())  # repeated entries are added; only sums have a norm
        parts = [p for p in plain_parts(gradient) if p.is_floating_point() or p.is_complex()]
        found[id(gradient)] = Gradient(name, param, gradient, parts, slot, shards)
    gradients = Gradients(found.values())
    if meshes:
        gradients.mesh, gradients.slots = max(meshes, key=lambda mesh: mesh.size()), slot + 1
    return gradients


def _count_shards(param: Any) -> int:
    """Into how many different parts a DTensor is cut."""
    placements = enumerate(param.placements)
    dims = [dim for dim, placement in placements if not placement.is_replicate()]
    return math.prod(param.device_mesh.size(dim) for dim in dims)


class Gradients(list[Gradient]):
    """The gradients of a target.

    If any parameter is a DTensor, `mesh` is the largest of their meshes and has all ranks, and
    there are `slots` parameters. All ranks then know the same of all gradients: each tells what it
    has, counted by how many of the ranks have the same. So a value that is bad on one of several
    replicas is bad for all of them, and all take the same way, with the same collectives.
    """

    mesh: Any = None
    slots: int = 0
    is_clear: bool = False  # whether quick_norms has found all norms

    def over_ranks(self, values: Sequence[float], *, highest: bool = False) -> list[float]:
        """The sum of each over all ranks, or the highest; an all-reduce for each mesh dimension."""
        told = torch.tensor(values, dtype=torch.float64, device=self.mesh.device_type)
        for dim in range(self.mesh.ndim):
            op = dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM
            dist.all_reduce(told, op=op, group=self.mesh.get_group(dim))
        listed: list[float] = told.tolist()  # host sync
        return listed

    def share(self, gradient: Gradient) -> float:
        """What this rank's part counts: one over the number of ranks that have the same."""
        return gradient.shards / float(self.mesh.size())

    def quick_norm(self, parts: list[Tensor], power: float) -> Norm | None:
        """As quick_norm, of all ranks' parts."""
        if power == math.inf:  # which of two numbers is the higher, if one is NaN, is not said
            here = _rough_norm(parts, power)
            (largest,) = self.over_ranks([here if here == here else power], highest=True)
            return _exact(largest, power)
        powers = [
            self.share(own[0]) * _power(_rough_norm(_memory(own), power), power)
            for own in self._by_shards()
        ]
        (total,) = self.over_ranks([sum(powers)])
        return _exact(total ** (1 / power) if total >= 0 else math.nan, power)

    def true_norm(self, parts: list[Tensor], power: float) -> Norm:
        """As true_norm, of all ranks' parts."""
        norms = [(self.share(own[0]), true_norm(_memory(own), power)) for own in self._by_shards()]
        highest = max((norm.largest for _, norm in norms), default=0.0)
        (largest,) = self.over_ranks([highest], highest=True)
        if largest == 0 or power == math.inf:
            return Norm(largest)
        quotients = ((share, norm.largest / largest * norm.ratio) for share, norm in norms)
        (total,) = self.over_ranks([sum(share * quotient**power for share, quotient in quotients)])
        return Norm(largest, total ** (1 / power))

    def quick_norms(self) -> list[Norm | None]:
        """As quick_norms, of all ranks' parts."""
        rough = _rough_norms([gradient.memory for gradient in self])
        squares, is_there = [0.0] * self.slots, [0.0] * self.slots
        for gradient, norm in zip(self, rough, strict=True):
            squares[gradient.slot] = self.share(gradient) * _power(norm, 2.0)
            is_there[gradient.slot] = 1.0
        told = self.over_ranks([*squares, *is_there])
        norms = [_exact(math.sqrt(square), 2.0) for square in told[: self.slots]]
        pairs = zip(norms, told[self.slots :], strict=True)
        self.is_clear = all(norm is not None for norm, ranks in pairs if ranks)
        return [norms[gradient.slot] for gradient in self]

    def only(self, gradients: Iterable[Gradient]) -> Gradients:
        """Some of them, on the same ranks."""
        some = Gradients(gradients)
        some.mesh, some.slots = self.mesh, self.slots
        return some

    def true_norms(self) -> list[Norm]:
        """The true norm of each gradient, with power 2."""
        own = [true_norm(gradient.memory, 2.0) for gradient in self]
        if self.mesh is None:
            return own
        largest, squares = [0.0] * self.slots, [0.0] * self.slots
        for gradient, norm in zip(self, own, strict=True):
            largest[gradient.slot] = norm.largest
        largest = self.over_ranks(largest, highest=True)
        for gradient, norm in zip(self, own, strict=True):
            quotient = norm.largest / (largest[gradient.slot] or 1.0) * norm.ratio
            squares[gradient.slot] = self.share(gradient) * quotient**2
        squares = self.over_ranks(squares)
        return [Norm(largest[each.slot], math.sqrt(squares[each.slot])) for each in self]

    def _by_shards(self) -> list[list[Gradient]]:
        groups: dict[int, list[Gradient]] = {}
        for gradient in self:
            groups.setdefault(gradient.shards, []).append(gradient)
        return list(groups.values())


def _memory(gradients: Iterable[Gradient]) -> list[Tensor]:
    return [part for gradient in gradients for part in gradient.memory]


def _power(norm: float, power: float) -> float:
    """Inf where it is too large."""
    try:
        return float(norm**power)
    except OverflowError:
        return math.inf


def list_parameters(target: Target) -> list[Tensor]:
    """The parameters of the target; InputError where it is none."""
    if isinstance(target, nn.Module):
        return list(target.parameters())
    if isinstance(target, Optimizer):
        return params_of(target)
    params = [target] if isinstance(target, Tensor) else list(target)
    wrong = [type(param).__name__ for param in params if not isinstance(param, Tensor)]
    if wrong:
        raise InputError(
            f"clip_gradients got a {wrong[0]} among the parameters; "
            "it accepts a module, an optimizer, a parameter or several of them."
        )
    return params


class Norm(float):
    """A norm as `largest * ratio`, since the product of the two may overflow."""

    largest: float
    ratio: float

    def __new__(cls, largest: float, ratio: float = 1.0) -> Norm:
        norm = super().__new__(cls, largest * ratio)
        norm.largest, norm.ratio = largest, ratio
        return norm


def quick_norm(parts: list[Tensor], power: float) -> Norm | None:
    """The norm if it is finite and exact, which says that all elements are finite; else None."""
    return _exact(_rough_norm(parts, power), power) if parts else Norm(0.0)


def _exact(norm: float, power: float) -> Norm | None:
    is_exact = math.isfinite(norm) and (norm > _SAFE_NORM or power != 2)
    return Norm(norm) if is_exact else None


def _rough_norm(parts: list[Tensor], power: float) -> float:
    """The norm, unless it is too large or too small; NaN where it is not tried."""
    if power not in _QUICK_POWERS or any(part.is_complex() for part in parts):
        return math.nan
    norms = [_joint(_each(group, power), power).to(parts[0].device) for group in _by_kind(parts)]
    if not norms:
        return 0.0
    return float(norms[0] if len(norms) == 1 else _joint(norms, power))  # host sync


def quick_norms(memories: Sequence[list[Tensor]]) -> list[Norm | None]:
    """The same for each list of parts by itself, with power 2; one host read for each dtype."""
    return [_exact(norm, 2.0) for norm in _rough_norms(memories)]


def _rough_norms(memories: Sequence[list[Tensor]]) -> list[float]:
    norms = [0.0] * len(memories)
    owners = {id(part): number for number, parts in enumerate(memories) for part in parts}
    for group in _by_kind([part for parts in memories for part in parts]):
        is_complex = group[0].is_complex()
        own = [math.nan] * len(group) if is_complex else torch.stack(_each(group, 2.0)).tolist()
        for part, norm in zip(group, own, strict=True):
            norms[owners[id(part)]] = math.hypot(norms[owners[id(part)]], norm)
    return norms


def true_norm(parts: list[Tensor], power: float) -> Norm:
    """The norm of finite elements of any size: taken of quotients by the largest, widened."""
    largest = 0.0
    for part in parts:
        real = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
        largest = max(largest, float(vector_norm(compact(real), math.inf)))  # host sync
    if largest == 0:
        return Norm(0.0)
    ratios = [
        float(vector_norm(piece.to(wide(part)) / largest, power))  # host sync
        for part in parts
        for _, piece in pieces(part, WIDENED)
    ]
    return Norm(largest, float(vector_norm(torch.tensor(ratios, dtype=torch.float64), power)))


def joint_norm(norms: Sequence[Norm]) -> Norm:
    """The norm of all from the norm of each, with power 2."""
    largest = max((norm.largest for norm in norms), default=0.0)
    if largest == 0:
        return Norm(0.0)
    return Norm(largest, math.hypot(*(norm.largest / largest * norm.ratio for norm in norms)))


def exact_dtype(part: Tensor) -> torch.dtype:
    """The real dtype in which its elements can be multiplied without being rounded first."""
    return torch.float32 if part.dtype in _HALF else part.dtype.to_real()


def wide(part: Tensor) -> torch.dtype:
    """The widest dtype on its device."""
    if part.device.type == "mps":  # has no float64
        return torch.complex64 if part.is_complex() else torch.float32
    return torch.complex128 if part.is_complex() else torch.float64


def _by_kind(parts: list[Tensor]) -> Iterable[list[Tensor]]:
    """Grouped by what torch's fused calls need to have in common."""
    if parts and all(part.is_cpu and part.dtype is parts[0].dtype for part in parts):
        return (parts,)  # the usual case, in less time
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in parts:
        groups.setdefault((part.device, part.dtype), []).append(part)
    return groups.values()


def _joint(norms: list[Tensor], power: float) -> Tensor:
    together = torch.stack(norms)
    norm: Tensor = vector_norm(together.to(wide(together)), power)
    return norm


def _each(group: list[Tensor], power: float) -> list[Tensor]:
    """The norm of each part, as 0-d tensors on their device."""
    # _foreach_norm is one kernel for all parts; torch.linalg has only one call for each.
    if not group[0].is_cpu:
        return list(torch._foreach_norm(group, power, exact_dtype(group[0])))
    long = {n: _by_rows(part, power) for n, part in enumerate(group) if part.numel() > _SHORT}
    short = [part for part in group if part.numel() <= _SHORT]
    norms = iter(torch._foreach_norm(short, power, torch.float64)) if short else iter(())
    return [long[n] if n in long else next(norms) for n in range(len(group))]


def _by_rows(part: Tensor, power: float) -> Tensor:
    """In float64, but for short sums: of 30 million float32 the third digit would be wrong."""
    flat = compact(part)
    if flat.numel() != part.numel() or not flat.is_contiguous():
        return _joint([vector_norm(p.double(), power) for _, p in pieces(part, _SHORT)], power)
    flat, short = flat.view(-1), exact_dtype(part)
    count = flat.numel() // _ROW * _ROW
    rows = vector_norm(flat[:count].view(-1, _ROW), power, dim=1, dtype=short)
    norm: Tensor = vector_norm(rows, power, dtype=torch.float64)
    if count == flat.numel():
        return norm
    return _joint([norm, vector_norm(flat[count:].double(), power)], power)


def drop_bad(gradients: Gradients, drop: Drop) -> dict[str, int] | None:
    """Set what is not finite to 0; how many elements, by the name of the gradient.

    None when there is something bad, and nothing may be dropped.
    """
    if gradients.mesh is not None:
        return _drop_bad_on_ranks(gradients, drop)
    if all_finite(part for gradient in gradients for part in gradient.memory):
        return {}
    if drop == "nothing":
        return None
    return {
        gradient.name: sum(_zero(part, drop) for part in gradient.memory)
        for gradient in gradients
        if not all_finite(gradient.memory)
    }


def _drop_bad_on_ranks(gradients: Gradients, drop: Drop) -> dict[str, int] | None:
    """The same, of a gradient in which any rank has something bad.

    One that several ranks have is dropped as a whole: they might drop different elements of it.
    """
    bad, counts = [0.0] * gradients.slots, [0.0] * gradients.slots
    for gradient in gradients:
        bad[gradient.slot] = float(not all_finite(gradient.memory))
    bad = gradients.over_ranks(bad, highest=True)
    if not any(bad):
        return {}
    if drop == "nothing":
        return None
    found = [gradient for gradient in gradients if bad[gradient.slot]]
    for gradient in found:
        share = gradients.share(gradient)
        how: Drop = drop if share == 1 else "tensors"
        counts[gradient.slot] = share * sum(_zero(part, how) for part in gradient.memory)
    counts = gradients.over_ranks(counts)
    return {gradient.name: round(counts[gradient.slot]) for gradient in found}


def _zero(part: Tensor, drop: Drop) -> int:
    memory, count = compact(part), 0
    if drop == "tensors":
        memory.zero_()
        return part.numel()
    for _, piece in pieces(memory, WIDENED):
        bad = ~piece.isfinite()
        count += int(bad.sum())  # host sync
        piece.masked_fill_(bad, 0)
    return count * part.numel() // memory.numel()


def scale_down(parts: list[Tensor], norm: Norm, max_norm: float) -> None:
    """Bring the norm down to `max_norm`."""
    first, second = _factors(norm, max_norm)
    for group in _by_kind(parts):
        memory, dtype = [compact(part) for part in group], exact_dtype(group[0])
        fits = first * second > torch.finfo(dtype).tiny  # else in two steps
        for factor in (first * second,) if fits else (first, second):
            # As a tensor: a plain number would be rounded to float16 first.
            factor_tensor = torch.tensor(factor, dtype=dtype, device=group[0].device)
            torch._foreach_mul_(memory, factor_tensor)  # public mul_ is one call for each part


def scale_each(parts: Sequence[tuple[list[Tensor], Norm, float]]) -> None:
    """Bring the norm of each list of parts down to its own limit, in few calls."""
    factors: dict[int, float] = {}
    plain: list[Tensor] = []  # what can be multiplied by a plain number
    for own, norm, max_norm in parts:
        factor = math.prod(_factors(norm, max_norm))
        if all(exact_dtype(p) is p.dtype and factor > torch.finfo(p.dtype).tiny for p in own):
            plain += own
            factors.update((id(part), factor) for part in own)
        else:
            scale_down(own, norm, max_norm)
    for group in _by_kind(plain):
        # One kernel for all of them, each with its own factor.
        torch._foreach_mul_([compact(part) for part in group], [factors[id(p)] for p in group])


def _factors(norm: Norm, max_norm: float) -> tuple[float, float]:
    """Two whose product brings it down; the first is exact."""
    _, exponent = math.frexp(norm.largest)
    first = math.ldexp(1.0, -exponent)  # a power of two: multiplying by it is exact
    return first, max_norm / norm.ratio / (norm.largest * first)
