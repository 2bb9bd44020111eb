"""Clipping whose limit is learnt from the gradients themselves: AdaptiveClipper and its modes."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.clip import (
    ClipResult,
    Drop,
    Gradient,
    Norm,
    Target,
    check_drop,
    clip_whole,
    drop_bad,
    exact_dtype,
    gradients_in,
    joint,
    left_alone,
    listed,
    quick_norms,
    result_of,
    scale_each,
    true_norm,
    wide,
)
from stayfinite.detect.finite import note_finite
from stayfinite.detect.memory import compact, plain_parts
from stayfinite.errors import ConfigError


class Statistics(Protocol):
    """What one clipper has learnt. A bad sample never enters it."""

    @property
    def threshold(self) -> float:
        """The norm of all gradients from which on they are clipped; inf where there is none."""

    @property
    def thresholds(self) -> dict[str, float]:
        """The same for each tensor by itself, where each has its own."""

    def clip(self, gradients: Sequence[Gradient], drop: Drop) -> ClipResult: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Rule(Protocol):
    """The options of a mode."""

    @property
    def mode(self) -> str: ...

    def begin(self) -> Statistics:
        """With nothing learnt yet."""


class WholeNorm:
    """The clip of those who look at nothing but the norm of all gradients together."""

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm

    @property
    def threshold(self) -> float:
        return min(self._max_norm, self.limit())

    @property
    def thresholds(self) -> dict[str, float]:
        return {}

    def limit(self) -> float:
        """What has been learnt; inf before the first norm."""
        raise NotImplementedError

    def seen(self, norm: float) -> float:
        """What this norm may be at most; it is learnt from."""
        raise NotImplementedError

    def clip(self, gradients: Sequence[Gradient], drop: Drop) -> ClipResult:
        return clip_whole(gradients, self._allowed, drop=drop)

    def _allowed(self, norm: float, is_sound: bool) -> float:
        if not (is_sound and is_sample(norm)):
            return self.threshold
        return min(self._max_norm, self.seen(norm))


def is_sample(norm: float) -> bool:
    """Whether a norm can be learnt from."""
    return 0 < norm < math.inf


def times(number: float, factor: float) -> float:
    """The product of two positive numbers, never 0 and never inf."""
    return min(max(number * factor, sys.float_info.min), sys.float_info.max)


@dataclass(frozen=True, kw_only=True)
class ZScore:
    """Clips norms that are more than `deviations` above their moving average (ZClip).

    By Kumar et al., 2025 (arXiv 2504.02507): a norm with the z-score z is clipped to
    mean + deviations**2 * std / z, and enters the averages as clipped; the first `warmup` norms
    are only averaged. New here: the limit is never above `most` times the median of the last
    `window` norms, nor above `max_norm`, also during warm-up; and when more than half of the
    window is above the limit, the averages begin again from the window.
    """

    deviations: float = 2.5
    decay: float = 0.97
    warmup: int = 25
    eps: float = 1e-6
    window: int = 100
    most: float = 5.0
    max_norm: float = math.inf

    def __post_init__(self) -> None:
        positive(self, "deviations")
        between(self, "decay", 0, 1)
        whole(self, "warmup")
        positive(self, "eps")
        whole(self, "window", least=self.warmup)
        positive(self, "most")
        positive(self, "max_norm", finite=False)

    @property
    def mode(self) -> str:
        return "zscore"

    def begin(self) -> ZScoreStatistics:
        return ZScoreStatistics(self)


class ZScoreStatistics(WholeNorm):
    """Mean and standard deviation of the norm; a mean of 0 is none yet."""

    def __init__(self, rule: ZScore) -> None:
        super().__init__(rule.max_norm)
        self._rule = rule
        self._norms = Window(rule.window)
        self._mean = self._std = 0.0

    def limit(self) -> float:
        highest = self._highest()
        return highest if self._is_warming_up else min(highest, self._onset())

    def seen(self, norm: float) -> float:
        allowed = min(self._highest(), math.inf if self._is_warming_up else self._clipped(norm))
        self._norms.add(norm)
        if self._is_warming_up:
            if len(self._norms) >= self._rule.warmup:
                self._begin_again()
        else:
            self._average(min(norm, allowed))
            if self._norms.median() > self._onset():
                self._begin_again()
        return allowed

    @property
    def _is_warming_up(self) -> bool:
        return self._mean == 0

    def _highest(self) -> float:
        return times(self._norms.median(), self._rule.most) if len(self._norms) else math.inf

    def _onset(self) -> float:
        """Where clipping begins."""
        return times(self._mean + self._rule.deviations * self._std, 1.0)

    def _clipped(self, norm: float) -> float:
        """What is made of this norm; the further out it is, the less is left of the excess."""
        rule = self._rule
        z = (norm - self._mean) / (self._std + rule.eps)
        if not z > rule.deviations:
            return math.inf
        return times(self._mean + rule.deviations * self._std / (z / rule.deviations), 1.0)

    def _average(self, norm: float) -> None:
        decay = self._rule.decay
        self._mean = decay * self._mean + (1 - decay) * norm
        # As a length: the squares may overflow.
        old, new = math.sqrt(decay) * self._std, math.sqrt(1 - decay) * (norm - self._mean)
        self._std = min(math.hypot(old, new), sys.float_info.max)

    def _begin_again(self) -> None:
        """From the window, in which spikes count as clipped."""
        highest, count = self._highest(), len(self._norms)
        norms = [min(norm, highest) for norm in self._norms.values()]
        self._mean = sum(norm / count for norm in norms)
        root = math.sqrt(count)
        self._std = math.hypot(*((norm - self._mean) / root for norm in norms))

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self._norms.to_tensor(), "mean": self._mean, "std": self._std}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        norms = state["norms"]
        self._norms.load(norms[norms > 0])
        is_sound = is_sample(state["mean"]) and 0 <= state["std"] < math.inf
        self._mean, self._std = (state["mean"], state["std"]) if is_sound else (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Percentile:
    """Clips to a percentile of the last `window` norms, this one included (AutoClip).

    By Seetharaman et al., 2020 (arXiv 2007.14469), which takes all norms of the run; the 10th
    percentile, as there, clips nine steps of ten. New here: the limit is never further than a
    factor of `most` from the median of the window, and never above `max_norm`.
    """

    percentile: float = 10.0
    window: int = 1000
    most: float = 5.0
    max_norm: float = math.inf

    def __post_init__(self) -> None:
        between(self, "percentile", 0, 100)
        whole(self, "window")
        positive(self, "most")
        positive(self, "max_norm", finite=False)

    @property
    def mode(self) -> str:
        return "percentile"

    def begin(self) -> PercentileStatistics:
        return PercentileStatistics(self)


class PercentileStatistics(WholeNorm):
    """The last norms."""

    def __init__(self, rule: Percentile) -> None:
        super().__init__(rule.max_norm)
        self._rule = rule
        self._norms = Window(rule.window)

    def limit(self) -> float:
        if not len(self._norms):
            return math.inf
        return self._near(self._norms.percentile(self._rule.percentile), self._norms.median())

    def seen(self, norm: float) -> float:
        # The median of those before: of very few, a spike would be half.
        median = self._norms.median() if len(self._norms) else norm
        self._norms.add(norm)
        return self._near(self._norms.percentile(self._rule.percentile), median)

    def _near(self, limit: float, median: float) -> float:
        most = self._rule.most
        return min(max(limit, times(median, 1 / most)), times(median, most))

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self._norms.to_tensor()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        norms = state["norms"]
        self._norms.load(norms[norms > 0])


_NORMAL = 1.4826  # standard deviations in a median deviation, for a normal distribution


@dataclass(frozen=True, kw_only=True)
class Robust:
    """Clips to the median of the last `window` norms times a factor.

    The factor is `deviations` standard deviations of the logarithms of these norms, estimated
    from their median deviation, but at least `least` and at most `most`. It is `most` until
    there are `warmup` norms. Half of the window may be spikes without any effect on the limit.
    The limit is never above `max_norm`, which is also the limit before the first norm.
    """

    window: int = 128
    deviations: float = 6.0
    least: float = 3.0
    most: float = 5.0
    warmup: int = 16
    max_norm: float = math.inf

    def __post_init__(self) -> None:
        whole(self, "window", least=2)
        whole(self, "warmup")
        positive(self, "deviations")
        positive(self, "max_norm", finite=False)
        positive(self, "most")
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"least is {self.least!r} and most is {self.most!r}; "
                "they must be at least 1, and least not above most."
            )

    @property
    def mode(self) -> str:
        return "robust"

    def begin(self) -> RobustStatistics:
        return RobustStatistics(self)


class RobustStatistics(WholeNorm):
    """The logarithms of the last norms."""

    def __init__(self, rule: Robust) -> None:
        super().__init__(rule.max_norm)
        self._rule = rule
        self._logs = Window(rule.window)
        self._limit = math.inf

    def limit(self) -> float:
        return self._limit

    def seen(self, norm: float) -> float:
        allowed = self._limit
        self._logs.add(math.log(norm))
        self._limit = self._learnt()
        return allowed

    def _learnt(self) -> float:
        return times(math.exp(self._logs.median()), self._factor()) if len(self._logs) else math.inf

    def _factor(self) -> float:
        rule = self._rule
        if len(self._logs) < rule.warmup:
            return rule.most
        # Cut before exp, which may overflow.
        wanted = min(rule.deviations * _NORMAL * self._logs.deviation(), math.log(rule.most))
        return max(math.exp(wanted), rule.least)

    def state_dict(self) -> dict[str, Any]:
        return {"logs": self._logs.to_tensor()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._logs.load(state["logs"])
        self._limit = self._learnt()


Floats = NDArray[np.float64]
_LARGEST = sys.float_info.max


@dataclass(frozen=True, kw_only=True)
class PerTensor:
    """Clips each tensor to `factor` times the moving average of its own clipped norms (AdaGC).

    By Wang et al., 2025 (arXiv 2502.11034): in the first `warmup` steps all tensors together
    are clipped to `max_norm`, and the smallest norm of each is where its average begins. New
    here: a norm of 0 is not averaged, and a limit is never further than a factor of `most` from
    the median of the tensor's last `window` norms, as `max_norm` would leave them; so a first
    norm that is far too small, or a spike, is forgotten.
    """

    factor: float = 1.05
    decay: float = 0.98
    warmup: int = 100
    max_norm: float = 1.0
    window: int = 64
    most: float = 5.0

    def __post_init__(self) -> None:
        positive(self, "factor")
        between(self, "decay", 0, 1)
        whole(self, "warmup")
        positive(self, "max_norm", finite=False)
        whole(self, "window")
        positive(self, "most")

    @property
    def mode(self) -> str:
        return "per_tensor"

    def begin(self) -> PerTensorStatistics:
        return PerTensorStatistics(self)


class PerTensorStatistics:
    """One column for each tensor: its average, its last norms, and how many there have been."""

    def __init__(self, rule: PerTensor) -> None:
        self._rule = rule
        self._steps = 0
        self._columns: dict[str, int] = {}
        self._averages = np.zeros(0)
        self._counts = np.zeros(0, dtype=np.int64)
        self._norms = np.zeros((rule.window, 0))

    @property
    def threshold(self) -> float:
        return math.inf

    @property
    def thresholds(self) -> dict[str, float]:
        columns = np.arange(len(self._columns))
        limits = self._limits(columns, np.full(len(columns), self._rule.max_norm))
        return dict(zip(self._columns, limits.tolist(), strict=True))

    def clip(self, gradients: Sequence[Gradient], drop: Drop) -> ClipResult:
        elements = sum(part.numel() for gradient in gradients for part in gradient.memory)
        norms, dropped = _measured(gradients, drop)
        if norms is None:
            return left_alone(elements)
        whole = joint(norms)
        names = [gradient.name for gradient in gradients]
        limits = self._learn(names, norms, whole, is_sound=not dropped)
        above = [
            (gradient, norm, limit)
            for gradient, norm, limit in zip(gradients, norms, limits, strict=True)
            if norm > limit
        ]
        scale_each([(gradient.memory, norm, limit) for gradient, norm, limit in above])
        after = math.hypot(*map(min, norms, limits))
        note_finite([gradient.tensor for gradient in gradients], after)
        clipped = tuple(gradient.name for gradient, _, _ in above)
        return result_of(float(whole), dropped, elements, was_clipped=bool(above), clipped=clipped)

    def _learn(
        self, names: Sequence[str], norms: Sequence[Norm], whole: Norm, *, is_sound: bool
    ) -> list[float]:
        """What each may be at most; sound ones are learnt from."""
        columns = np.array([self._column(name) for name in names], dtype=np.int64)
        now = np.array(norms, dtype=np.float64)
        together = _limited(norms, whole, self._rule.max_norm)
        limits = self._limits(columns, together)
        is_sample = is_sound & (now > 0) & np.isfinite(now)
        chosen = columns[is_sample]
        self._average(chosen, np.minimum(now, limits)[is_sample])
        self._norms[self._counts[chosen] % self._rule.window, chosen] = together[is_sample]
        self._counts[chosen] += 1
        self._steps += bool(is_sample.any())
        return [float(limit) for limit in limits]

    def _column(self, name: str) -> int:
        column = self._columns.setdefault(name, len(self._columns))
        if column == len(self._averages):
            self._averages = np.append(self._averages, 0.0)
            self._counts = np.append(self._counts, 0)
            self._norms = np.column_stack([self._norms, np.zeros(self._rule.window)])
        return column

    def _average(self, columns: NDArray[np.int64], norms: Floats) -> None:
        old, decay = self._averages[columns], self._rule.decay
        if self._steps < self._rule.warmup:
            new = np.minimum(old, norms)
        else:
            new = decay * old + (1 - decay) * norms
        self._averages[columns] = np.where(self._counts[columns] > 0, new, norms)

    def _limits(self, columns: NDArray[np.int64], together: Floats) -> Floats:
        """Of the tensors in these columns; a new one may be what all tensors together allow."""
        is_known = self._counts[columns] > 0
        medians = self._medians(columns)
        if self._steps < self._rule.warmup:
            own = np.minimum(together, medians * self._rule.most)
        else:
            own = self._rule.factor * self._averages[columns]
            own = np.clip(own, medians / self._rule.most, medians * self._rule.most)
        return np.minimum(np.where(is_known, own, together), _LARGEST)

    def _medians(self, columns: NDArray[np.int64]) -> Floats:
        """Of the norms in the window; 0 of none."""
        lengths = np.minimum(self._counts[columns], self._rule.window)
        is_used = np.arange(self._rule.window)[:, None] < lengths
        ordered = np.sort(np.where(is_used, self._norms[:, columns], np.inf), axis=0)
        places = np.arange(len(columns))
        halves = ordered[np.maximum(lengths - 1, 0) // 2, places], ordered[lengths // 2, places]
        return np.where(lengths > 0, halves[0] / 2 + halves[1] / 2, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "names": list(self._columns),
            "steps": self._steps,
            "averages": torch.from_numpy(self._averages.copy()),
            "counts": torch.from_numpy(self._counts.copy()),
            "norms": torch.from_numpy(self._norms.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["norms"]) != self._rule.window:
            raise ConfigError(
                f"the state has a window of {len(state['norms'])} norms, and this clipper one of "
                f"{self._rule.window}; make it with window={len(state['norms'])}."
            )
        self._columns = {name: number for number, name in enumerate(state["names"])}
        self._steps = state["steps"]
        self._averages = state["averages"].numpy().copy()
        self._norms = state["norms"].numpy().copy()
        is_sound = np.isfinite(self._averages) & np.isfinite(self._norms).all(axis=0)
        self._counts = np.where(is_sound & (self._averages > 0), state["counts"].numpy(), 0)


def _measured(
    gradients: Sequence[Gradient], drop: Drop
) -> tuple[list[Norm] | None, dict[str, int]]:
    """The norm of each, and how many elements were dropped of which; None where none may be."""
    quick = quick_norms([gradient.memory for gradient in gradients])
    unclear = [g for g, norm in zip(gradients, quick, strict=True) if norm is None]
    dropped = drop_bad(unclear, drop) if unclear else {}
    if dropped is None:
        return None, {}
    pairs = zip(gradients, quick, strict=True)
    return [true_norm(g.memory, 2.0) if norm is None else norm for g, norm in pairs], dropped


def _limited(norms: Sequence[Norm], whole: Norm, max_norm: float) -> Floats:
    """Each norm after all tensors together were clipped."""
    if not whole > max_norm:
        return np.array(norms, dtype=np.float64)
    shares = [n.largest / whole.largest * (n.ratio / whole.ratio) for n in norms]
    return np.array(shares, dtype=np.float64) * max_norm


@dataclass(frozen=True, kw_only=True)
class PerUnit:
    """Clips the gradient of each unit to `ratio` times the norm of its weights (AGC).

    By Brock et al., 2021 (arXiv 2102.06171): a unit is a row of a matrix, a filter of a
    convolution, or a whole vector; the norm of its weights counts as at least `eps`. Nothing is
    learnt. The authors leave the last layer out: give the clipper the other parameters.
    """

    ratio: float = 0.01
    eps: float = 1e-3

    def __post_init__(self) -> None:
        positive(self, "ratio")
        positive(self, "eps")

    @property
    def mode(self) -> str:
        return "per_unit"

    def begin(self) -> PerUnitStatistics:
        return PerUnitStatistics(self)


class PerUnitStatistics:
    """There are none: the weights say what is allowed."""

    def __init__(self, rule: PerUnit) -> None:
        self._rule = rule

    @property
    def threshold(self) -> float:
        return math.inf

    @property
    def thresholds(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take."""

    def clip(self, gradients: Sequence[Gradient], drop: Drop) -> ClipResult:
        units = [unit for gradient in gradients for unit in _units(gradient)]
        elements = sum(part.numel() for gradient in gradients for part in gradient.memory)
        norms, dropped = [_norms(unit.gradient) for unit in units], dict[str, int]()
        whole = float(_joint([own.largest for own in norms]))  # host sync
        if not math.isfinite(whole):
            found = drop_bad(gradients, drop)
            if found is None:
                return left_alone(elements)
            norms, dropped = [_true_norms(unit.gradient) for unit in units], found
            whole = float(true_norm([unit.gradient for unit in units], 2.0))
        names, after = self._scale(units, norms)
        note_finite([gradient.tensor for gradient in gradients], after)
        return result_of(whole, dropped, elements, was_clipped=bool(names), clipped=names)

    def _scale(
        self, units: Sequence[Unit], norms: Sequence[Norms]
    ) -> tuple[tuple[str, ...], float]:
        """Bring each unit down to its limit; the tensors with such units, and the norm of all."""
        factors = [self._factors(unit, own) for unit, own in zip(units, norms, strict=True)]
        *lowest, after = _read(norms, factors)
        clipped = [number for number, low in enumerate(lowest) if low < 1]
        for number in clipped:
            _multiply(units[number].memory, factors[number], lowest[number])
        return tuple(dict.fromkeys(units[number].name for number in clipped)), after

    def _factors(self, unit: Unit, norms: Norms) -> Tensor:
        """1 for a unit that is small enough."""
        weights = _norms(unit.weight).largest
        # A bad weight, or one that is too large to be squared, allows no more than a tiny one.
        weights = torch.where(weights.isfinite(), weights, 0.0).clamp(min=self._rule.eps)
        limits = self._rule.ratio * weights
        is_above = norms.largest * norms.ratio > limits
        return torch.where(is_above, limits / norms.largest / norms.ratio, 1.0)


class Unit(NamedTuple):
    """Units along the first dimension: what is measured, its weights, and what is multiplied."""

    name: str
    gradient: Tensor
    weight: Tensor
    memory: Tensor


class Norms(NamedTuple):
    """The norm of each unit as `largest * ratio`, since the product of the two may overflow."""

    largest: Tensor
    ratio: Tensor


def _units(gradient: Gradient) -> Iterator[Unit]:
    for part, weight in zip(gradient.memory, _weights(gradient), strict=True):
        is_whole = part.dim() < 2 or part.shape != weight.shape or _has_repeats(part)
        part, weight = _real(part), _real(weight)
        if is_whole:
            yield Unit(gradient.name, part[None], weight[None], compact(part)[None])
        else:
            yield Unit(gradient.name, part, weight, part)


def _weights(gradient: Gradient) -> Sequence[Tensor]:
    """One for each part of the gradient."""
    tensor, param = gradient.tensor, gradient.param.detach()
    is_sparse = tensor.layout is torch.sparse_coo
    if is_sparse and tensor.sparse_dim() == 1 and tensor.dense_dim() > 0:  # of an embedding
        return (param[tensor._indices()[0]],)
    weights = list(plain_parts(param))
    return weights if len(weights) == len(gradient.memory) else [param] * len(gradient.memory)


def _has_repeats(part: Tensor) -> bool:
    """Whether it was expanded, so that it cannot be written as a whole."""
    return any(not step and size > 1 for step, size in zip(part.stride(), part.shape, strict=True))


def _real(part: Tensor) -> Tensor:
    """The same memory; the norm of a complex number is that of its two parts."""
    if not part.is_complex():
        return part
    return torch.view_as_real(part.conj() if part.is_conj() else part)


def _norms(rows: Tensor) -> Norms:
    """True unless one overflows; where one underflows, it is far below any limit."""
    norms = torch.linalg.vector_norm(
        rows, dim=tuple(range(1, rows.dim())), keepdim=True, dtype=exact_dtype(rows)
    )
    return Norms(norms.to(wide(rows)), torch.ones((), device=rows.device))


def _true_norms(rows: Tensor) -> Norms:
    """True for finite elements of any size."""
    inner, rows = tuple(range(1, rows.dim())), rows.to(wide(rows))
    largest = torch.linalg.vector_norm(rows, math.inf, dim=inner, keepdim=True)
    largest = largest.clamp(min=torch.finfo(rows.dtype).tiny)
    return Norms(largest, torch.linalg.vector_norm(rows / largest, dim=inner, keepdim=True))


def _joint(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all units of all tensors; not finite when one of them is not."""
    if not norms:
        return torch.zeros(())
    together = torch.cat([own.to(norms[0].device).flatten() for own in norms])
    joint: Tensor = torch.linalg.vector_norm(together)
    return joint


def _read(norms: Sequence[Norms], factors: Sequence[Tensor]) -> list[float]:
    """The smallest factor of each tensor, and the norm of all that is left."""
    left = [own.largest * factor * own.ratio for own, factor in zip(norms, factors, strict=True)]
    joint = _joint(left)
    smallest = [factor.min().to(joint.device) for factor in factors]
    values: list[float] = torch.stack([*smallest, joint]).tolist()  # host sync
    return values


def _multiply(memory: Tensor, factor: Tensor, lowest: float) -> None:
    factor = factor.reshape([-1] + [1] * (memory.dim() - 1))
    dtype = exact_dtype(memory)
    if lowest > torch.finfo(dtype).tiny:
        memory.mul_(factor.to(dtype))
    else:
        memory.copy_(memory.to(wide(memory)) * factor)


Mode = Literal["robust", "percentile", "zscore", "per_unit", "per_tensor"]
_RULES: dict[str, type[Rule]] = {
    "robust": Robust,
    "percentile": Percentile,
    "zscore": ZScore,
    "per_unit": PerUnit,
    "per_tensor": PerTensor,
}


class AdaptiveClipper:
    """Clips the gradients of a target to what is usual for them; call `clip()` before each update.

    The target is a module, an optimizer, a parameter or several. The mode is a name, or one of
    the classes with options: `Robust`, `Percentile`, `ZScore`, `PerUnit`, `PerTensor`. Bad values
    are dropped as in `clip_gradients`; a step in which there were any is never learnt from. Under
    a GradScaler, call `unscale_` first: the norms must be those of the true gradients.

    It has the methods of a scheduler: `watch(..., scheduler=[scheduler, clipper])` takes back
    what was learnt in a step that is undone, and checkpoints carry it.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> clipper = AdaptiveClipper(weight)
    >>> for size in (1.0, 1.0, 1000.0):
    ...     weight.grad = torch.tensor([0.6, 0.8]) * size
    ...     result = clipper.clip()
    >>> result.was_clipped, weight.grad
    (True, tensor([3., 4.]))
    """

    # Without a __dict__ a snapshot asks for state_dict, and does not walk into the parameters.
    __slots__ = ("__weakref__", "_drop", "_names", "_rule", "_statistics", "_target")

    def __init__(
        self,
        target: Target,
        mode: Mode | Rule = "robust",
        *,
        drop: Drop = "elements",
        names: Iterable[str] | None = None,
    ) -> None:
        check_drop(drop)
        self._rule = _rule_of(mode)
        self._statistics = self._rule.begin()
        self._drop: Drop = drop
        self._names = None if names is None else list(names)
        # An iterator of parameters can be gone through only once.
        self._target = target if isinstance(target, (nn.Module, Optimizer)) else listed(target)

    @property
    def rule(self) -> Rule:
        """The mode with its options."""
        return self._rule

    @property
    def threshold(self) -> float:
        """The norm above which all gradients together are clipped.

        It is inf before the first norm, and where each tensor or unit has a limit of its own.
        """
        return self._statistics.threshold

    @property
    def thresholds(self) -> dict[str, float]:
        """The limits of the tensors by their names, with mode per_tensor; else nothing."""
        return self._statistics.thresholds

    @torch.no_grad()
    def clip(self) -> ClipResult:
        """Clip the gradients in place, and learn from them. One pass, and one host read."""
        return self._statistics.clip(gradients_in(self._target, self._names), self._drop)

    def state_dict(self) -> dict[str, Any]:
        """What has been learnt, as plain data and tensors on the CPU; the options are not in it."""
        return {"mode": self._rule.mode, **self._statistics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if state["mode"] != self._rule.mode:
            raise ConfigError(
                f"the state is of mode {state['mode']!r}, and this clipper has mode "
                f"{self._rule.mode!r}; make one with mode={state['mode']!r}."
            )
        self._statistics.load_state_dict(state)


def _rule_of(mode: Mode | Rule) -> Rule:
    if isinstance(mode, str) and mode in _RULES:
        return _RULES[mode]()
    if isinstance(mode, str) or not hasattr(mode, "begin"):
        raise ConfigError(
            f"mode is {mode!r}; it must be one of {', '.join(get_args(Mode))}, or an object "
            "with options such as Robust()."
        )
    return mode


def whole(options: Any, name: str, *, least: int = 1) -> None:
    """A whole number from `least` on."""
    value = getattr(options, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}.")


def between(options: Any, name: str, low: float, high: float) -> None:
    """A number in the closed interval."""
    value = getattr(options, name)
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be between {low:g} and {high:g}.")


def positive(options: Any, name: str, *, finite: bool = True) -> None:
    """A number greater than 0."""
    value = getattr(options, name)
    if not value > 0 or (finite and not math.isfinite(value)):
        said = "a finite number" if finite else "a number"
        raise ConfigError(f"{name} is {value!r}; it must be {said} greater than 0.")


class Window:
    """Up to `length` finite numbers; a new one pushes the oldest out."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._last)

    def values(self) -> Iterable[float]:
        """The oldest first."""
        return tuple(self._last)

    def add(self, value: float) -> None:
        if len(self._last) == self._length:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
        self._last.append(value)
        insort(self._sorted, value)

    def median(self) -> float:
        return _middle(self._sorted)

    def deviation(self) -> float:
        """The median distance from the median."""
        middle = self.median()
        return _middle(sorted([abs(value - middle) for value in self._sorted]))

    def percentile(self, percent: float) -> float:
        """Between two values it lies on the line that joins them."""
        place = (len(self._sorted) - 1) * percent / 100
        below = math.floor(place)
        share = place - below
        if not share:
            return self._sorted[below]
        return self._sorted[below] * (1 - share) + self._sorted[below + 1] * share

    def to_tensor(self) -> Tensor:
        return torch.tensor(self._last, dtype=torch.float64, device="cpu")

    def load(self, values: Tensor) -> None:
        """Hold these instead; what is not finite is left out."""
        kept = [value for value in values.tolist() if math.isfinite(value)]
        self._last = deque(kept[-self._length :])
        self._sorted = sorted(self._last)


def _middle(values: list[float]) -> float:
    half = len(values) // 2
    if len(values) % 2:
        return values[half]
    return values[half - 1] / 2 + values[half] / 2  # the sum of the two may overflow
