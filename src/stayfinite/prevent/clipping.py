"""Clipping whose limit is learnt from the gradients themselves: AdaptiveClipper and its modes."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.optim import Optimizer

from stayfinite.clip import (
    ClipResult,
    Drop,
    Gradient,
    Gradients,
    Norm,
    Target,
    check_drop,
    clip_whole,
    drop_bad,
    exact_dtype,
    gradients_in,
    joint_norm,
    list_parameters,
    quick_norms,
    result_of,
    scale_each,
    true_norm,
    untouched_result,
    wide,
)
from stayfinite.detect.memory import compact, plain_parts
from stayfinite.errors import ConfigError
from stayfinite.settings import require_whole

Mode = Literal["robust", "percentile", "zscore", "per_unit", "per_tensor"]
Floats = NDArray[np.float64]

_NORMAL = 1.4826  # standard deviations in a median deviation, for a normal distribution
_LARGEST = sys.float_info.max
_INTERVALS = {"decay": (0, 1), "percentile": (0, 100)}


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
        rule = _RULES[mode]() if isinstance(mode, str) and mode in _RULES else mode
        if isinstance(rule, str) or not hasattr(rule, "begin"):
            raise ConfigError(
                f"mode is {mode!r}; it must be one of {', '.join(get_args(Mode))}, or an object "
                "with options such as Robust()."
            )
        self._rule, self._statistics = rule, rule.begin()
        self._drop: Drop = drop
        self._names = None if names is None else list(names)
        # An iterator of parameters can be gone through only once.
        is_whole = isinstance(target, (nn.Module, Optimizer))
        self._target = target if is_whole else list_parameters(target)

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


class Rule:
    """The options of a mode; they are checked when it is made."""

    mode: ClassVar[str]

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("window", "warmup"):
                require_whole(name, value)
            elif name in _INTERVALS:
                low, high = _INTERVALS[name]
                if not low <= value <= high:
                    raise ConfigError(f"{name} is {value!r}; it must be between {low} and {high}.")
            elif name != "least" and (
                not value > 0 or (name != "max_norm" and not math.isfinite(value))
            ):
                kind = "a number" if name == "max_norm" else "a finite number"
                raise ConfigError(f"{name} is {value!r}; it must be {kind} greater than 0.")

    def begin(self) -> Statistics:
        """With nothing learnt yet."""
        raise NotImplementedError


class Statistics:
    """What one clipper has learnt, if anything. A bad sample never enters it."""

    @property
    def threshold(self) -> float:
        """The norm of all gradients from which on they are clipped; inf where there is none."""
        return math.inf

    @property
    def thresholds(self) -> dict[str, float]:
        """The same for each tensor by itself, where each has its own."""
        return {}

    def clip(self, gradients: Gradients, drop: Drop) -> ClipResult:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class NormRule(Rule):
    """A mode that looks at nothing but the norm of all gradients together."""

    has_logs: ClassVar[bool] = False  # whether logarithms of the norms are kept
    has_moments: ClassVar[bool] = False
    window: int
    max_norm: float

    def begin(self) -> Statistics:
        return NormStatistics(self)

    def limit(self, learnt: NormStatistics) -> float:
        """What a norm may be at most; inf before the first one."""
        raise NotImplementedError

    def learn(self, learnt: NormStatistics, norm: float) -> float:
        """What this norm may be at most; it is learnt from."""
        allowed = self.limit(learnt)
        learnt.norms.add(math.log(norm) if self.has_logs else norm)
        return allowed


class NormStatistics(Statistics):
    """The last norms; for a z-score also their mean, 0 if there is none yet, and deviation."""

    def __init__(self, rule: NormRule) -> None:
        self.rule, self.norms = rule, SortedWindow(rule.window)
        self.mean = self.std = 0.0

    @property
    def threshold(self) -> float:
        return min(self.rule.max_norm, self.rule.limit(self))

    def clip(self, gradients: Gradients, drop: Drop) -> ClipResult:
        def allowed(norm: float, is_sound: bool) -> float:
            if is_sound and 0 < norm < math.inf:
                return min(self.rule.max_norm, self.rule.learn(self, norm))
            return self.threshold

        return clip_whole(gradients, allowed, drop=drop)

    def state_dict(self) -> dict[str, Any]:
        moments = {"mean": self.mean, "std": self.std} if self.rule.has_moments else {}
        norms = torch.tensor(self.norms.last, dtype=torch.float64, device="cpu")
        return {"logs" if self.rule.has_logs else "norms": norms, **moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        has_logs = self.rule.has_logs
        self.norms.load(state["logs"] if has_logs else state["norms"][state["norms"] > 0])
        mean, std = state.get("mean", 0.0), state.get("std", 0.0)
        is_sound = 0 < mean < math.inf and 0 <= std < math.inf
        self.mean, self.std = (mean, std) if is_sound else (0.0, 0.0)


def _times(number: float, factor: float) -> float:
    """The product of two positive numbers, never 0 and never inf."""
    return min(max(number * factor, sys.float_info.min), _LARGEST)


@dataclass(frozen=True, kw_only=True)
class ZScore(NormRule):
    """Clips norms that are more than `deviations` above their moving average (ZClip).

    By Kumar et al., 2025 (arXiv 2504.02507): a norm with the z-score z is clipped to
    mean + deviations**2 * std / z, and enters the averages as clipped; the first `warmup` norms
    are only averaged. New here: the limit is never above `most` times the median of the last
    `window` norms, nor above `max_norm`, also during warm-up; and when more than half of the
    window is above the limit, the averages begin again from the window.
    """

    mode: ClassVar[str] = "zscore"
    has_moments: ClassVar[bool] = True
    deviations: float = 2.5
    decay: float = 0.97
    warmup: int = 25
    eps: float = 1e-6
    window: int = 100
    most: float = 5.0
    max_norm: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("window", self.window, self.warmup)

    def limit(self, learnt: NormStatistics) -> float:
        return min(self._highest(learnt), self._onset(learnt) if learnt.mean else math.inf)

    def learn(self, learnt: NormStatistics, norm: float) -> float:
        allowed, is_warm = self._highest(learnt), learnt.mean != 0
        if is_warm:
            z = (norm - learnt.mean) / (learnt.std + self.eps)
            if z > self.deviations:  # the further out, the less is left of the excess
                left = learnt.mean + self.deviations * learnt.std / (z / self.deviations)
                allowed = min(allowed, _times(left, 1.0))
        learnt.norms.add(norm)
        if is_warm:
            self._average(learnt, min(norm, allowed))
        is_outgrown = is_warm and learnt.norms.median() > self._onset(learnt)
        if is_outgrown or (not is_warm and len(learnt.norms) >= self.warmup):
            self._begin_again(learnt)
        return allowed

    def _highest(self, learnt: NormStatistics) -> float:
        return _times(learnt.norms.median(), self.most) if len(learnt.norms) else math.inf

    def _onset(self, learnt: NormStatistics) -> float:
        """Where clipping begins."""
        return _times(learnt.mean + self.deviations * learnt.std, 1.0)

    def _average(self, learnt: NormStatistics, norm: float) -> None:
        decay = self.decay
        learnt.mean = decay * learnt.mean + (1 - decay) * norm
        # As a length: the squares may overflow.
        old, new = math.sqrt(decay) * learnt.std, math.sqrt(1 - decay) * (norm - learnt.mean)
        learnt.std = min(math.hypot(old, new), _LARGEST)

    def _begin_again(self, learnt: NormStatistics) -> None:
        """From the window, in which spikes count as clipped."""
        highest, count = self._highest(learnt), len(learnt.norms)
        norms = [min(norm, highest) for norm in learnt.norms.last]
        learnt.mean = sum(norm / count for norm in norms)
        root = math.sqrt(count)
        learnt.std = math.hypot(*((norm - learnt.mean) / root for norm in norms))


@dataclass(frozen=True, kw_only=True)
class Percentile(NormRule):
    """Clips to a percentile of the last `window` norms, this one included (AutoClip).

    By Seetharaman et al., 2020 (arXiv 2007.14469), which takes all norms of the run; the 10th
    percentile, as there, clips nine steps of ten. New here: the limit is never further than a
    factor of `most` from the median of the window, and never above `max_norm`.
    """

    mode: ClassVar[str] = "percentile"
    percentile: float = 10.0
    window: int = 1000
    most: float = 5.0
    max_norm: float = math.inf

    def limit(self, learnt: NormStatistics) -> float:
        return self._near(learnt, learnt.norms.median()) if len(learnt.norms) else math.inf

    def learn(self, learnt: NormStatistics, norm: float) -> float:
        # The median of those before: of very few, a spike would be half.
        median = learnt.norms.median() if len(learnt.norms) else norm
        learnt.norms.add(norm)
        return self._near(learnt, median)

    def _near(self, learnt: NormStatistics, median: float) -> float:
        limit = max(learnt.norms.percentile(self.percentile), _times(median, 1 / self.most))
        return min(limit, _times(median, self.most))


@dataclass(frozen=True, kw_only=True)
class Robust(NormRule):
    """Clips to the median of the last `window` norms times a factor.

    The factor is `deviations` standard deviations of the logarithms of these norms, estimated
    from their median deviation, but at least `least` and at most `most`. It is `most` until
    there are `warmup` norms. Half of the window may be spikes without any effect on the limit.
    The limit is never above `max_norm`, which is also the limit before the first norm.
    """

    mode: ClassVar[str] = "robust"
    has_logs: ClassVar[bool] = True
    window: int = 128
    deviations: float = 6.0
    least: float = 3.0
    most: float = 5.0
    warmup: int = 16
    max_norm: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("window", self.window, 2)
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"least is {self.least!r} and most is {self.most!r}; "
                "they must be at least 1, and least not above most."
            )

    def limit(self, learnt: NormStatistics) -> float:
        logs, factor = learnt.norms, self.most
        if len(logs) >= self.warmup:
            # Cut before exp, which may overflow.
            wanted = min(self.deviations * _NORMAL * logs.deviation(), math.log(self.most))
            factor = max(math.exp(wanted), self.least)
        return _times(math.exp(logs.median()), factor) if len(logs) else math.inf


class SortedWindow:
    """Up to `length` finite numbers; a new one pushes the oldest out."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.last: deque[float] = deque()  # the oldest first
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self.last)

    def add(self, value: float) -> None:
        if len(self.last) == self._length:
            del self._sorted[bisect_left(self._sorted, self.last.popleft())]
        self.last.append(value)
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

    def load(self, values: Tensor) -> None:
        """Hold these instead; what is not finite is left out."""
        finite = [value for value in values.tolist() if math.isfinite(value)]
        self.last = deque(finite[-self._length :])
        self._sorted = sorted(self.last)


def _middle(values: list[float]) -> float:
    half = len(values) // 2
    if len(values) % 2:
        return values[half]
    return values[half - 1] / 2 + values[half] / 2  # the sum of the two may overflow


@dataclass(frozen=True, kw_only=True)
class PerTensor(Rule):
    """Clips each tensor to `factor` times the moving average of its own clipped norms (AdaGC).

    By Wang et al., 2025 (arXiv 2502.11034): in the first `warmup` steps all tensors together
    are clipped to `max_norm`, and the smallest norm of each is where its average begins. New
    here: a norm of 0 is not averaged, and a limit is never further than a factor of `most` from
    the median of the tensor's last `window` norms, as `max_norm` would leave them; so a first
    norm that is far too small, or a spike, is forgotten.
    """

    mode: ClassVar[str] = "per_tensor"
    factor: float = 1.05
    decay: float = 0.98
    warmup: int = 100
    max_norm: float = 1.0
    window: int = 64
    most: float = 5.0

    def begin(self) -> Statistics:
        return PerTensorStatistics(self)


class PerTensorStatistics(Statistics):
    """One column for each tensor: its average, its last norms, and how many there have been."""

    def __init__(self, rule: PerTensor) -> None:
        self._rule = rule
        self._steps = 0
        self._columns: dict[str, int] = {}
        self._averages = np.zeros(0)
        self._counts = np.zeros(0, dtype=np.int64)
        self._norms = np.zeros((rule.window, 0))

    @property
    def thresholds(self) -> dict[str, float]:
        columns = np.arange(len(self._columns))
        limits = self._limits(columns, np.full(len(columns), self._rule.max_norm))
        return dict(zip(self._columns, limits.tolist(), strict=True))

    def clip(self, gradients: Gradients, drop: Drop) -> ClipResult:
        is_alone = gradients.mesh is None
        memories = [gradient.memory for gradient in gradients]
        found = quick_norms(memories) if is_alone else gradients.quick_norms()
        quick = list(zip(gradients, found, strict=True))
        unclear = gradients.only(gradient for gradient, norm in quick if norm is None)
        is_clear = not unclear if is_alone else gradients.is_clear  # the same on all ranks
        dropped = {} if is_clear else drop_bad(unclear, drop)
        if dropped is None:
            return untouched_result(gradients)
        true = iter(() if is_clear else unclear.true_norms())
        norms = [next(true) if norm is None else norm for norm in found]
        whole = joint_norm(norms)
        names = [gradient.name for gradient in gradients]
        limits = self._learn(names, norms, whole, is_sound=not dropped)
        above = [each for each in zip(gradients, norms, limits, strict=True) if each[1] > each[2]]
        scale_each([(gradient.memory, norm, limit) for gradient, norm, limit in above])
        after = math.hypot(*map(min, norms, limits))
        clipped = [gradient.name for gradient, _, _ in above]
        return result_of(gradients, whole, after, dropped, clipped=clipped)

    def _learn(
        self, names: Sequence[str], norms: Sequence[Norm], whole: Norm, *, is_sound: bool
    ) -> list[float]:
        """What each may be at most; sound ones are learnt from."""
        rule, now = self._rule, np.array(norms, dtype=np.float64)
        columns = self._columns_of(names)
        together = now  # each norm after all tensors together were clipped
        if whole > rule.max_norm:
            shares = [n.largest / whole.largest * (n.ratio / whole.ratio) for n in norms]
            together = np.array(shares, dtype=np.float64) * rule.max_norm
        limits = self._limits(columns, together)
        is_sample = is_sound & (now > 0) & np.isfinite(now)
        chosen, left = columns[is_sample], np.minimum(now, limits)[is_sample]
        old, counts = self._averages[chosen], self._counts[chosen]
        if self._steps < rule.warmup:
            new = np.minimum(old, left)
        else:
            new = rule.decay * old + (1 - rule.decay) * left
        self._averages[chosen] = np.where(counts > 0, new, left)
        self._norms[counts % rule.window, chosen] = together[is_sample]
        self._counts[chosen] += 1
        self._steps += bool(is_sample.any())
        return [float(limit) for limit in limits]

    def _columns_of(self, names: Sequence[str]) -> NDArray[np.int64]:
        columns = [self._columns.setdefault(name, len(self._columns)) for name in names]
        new = len(self._columns) - len(self._averages)
        if new:
            self._averages = np.pad(self._averages, (0, new))
            self._counts = np.pad(self._counts, (0, new))
            self._norms = np.pad(self._norms, ((0, 0), (0, new)))
        return np.array(columns, dtype=np.int64)

    def _limits(self, columns: NDArray[np.int64], together: Floats) -> Floats:
        """Of the tensors in these columns; a new one may be what all tensors together allow."""
        rule, medians = self._rule, self._medians(columns)
        if self._steps < rule.warmup:
            own = np.minimum(together, medians * rule.most)
        else:
            own = rule.factor * self._averages[columns]
            own = np.clip(own, medians / rule.most, medians * rule.most)
        return np.minimum(np.where(self._counts[columns] > 0, own, together), _LARGEST)

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


@dataclass(frozen=True, kw_only=True)
class PerUnit(Rule, Statistics):
    """Clips the gradient of each unit to `ratio` times the norm of its weights (AGC).

    By Brock et al., 2021 (arXiv 2102.06171): a unit is a row of a matrix, a filter of a
    convolution, or a whole vector; the norm of its weights counts as at least `eps`. Nothing is
    learnt. The authors leave the last layer out: give the clipper the other parameters. Of a unit
    that is cut between ranks, each rank compares its own part.
    """

    mode: ClassVar[str] = "per_unit"
    ratio: float = 0.01
    eps: float = 1e-3

    def begin(self) -> Statistics:
        return self  # there is nothing to hold: the weights say what is allowed

    def clip(self, gradients: Gradients, drop: Drop) -> ClipResult:
        units = [unit for gradient in gradients for unit in _units(gradient)]
        norms, dropped = [_norms(unit.gradient) for unit in units], dict[str, int]()
        whole = float(_joint([largest for largest, _ in norms]))  # host sync
        if gradients.mesh is not None:
            whole = float(gradients.quick_norm([], 2.0) or math.nan)
        if not math.isfinite(whole):
            found = drop_bad(gradients, drop)
            if found is None:
                return untouched_result(gradients)
            norms, dropped = [_true_norms(unit.gradient) for unit in units], found
            parts = [unit.gradient for unit in units]
            is_alone = gradients.mesh is None
            whole = float(true_norm(parts, 2.0) if is_alone else gradients.true_norm(parts, 2.0))
        factors = [self._factors(u.weight, *own) for u, own in zip(units, norms, strict=True)]
        joint = _joint([norm[0] * f * norm[1] for norm, f in zip(norms, factors, strict=True)])
        smallest = [factor.min().to(joint.device) for factor in factors]
        *lowest, after = torch.stack([*smallest, joint]).tolist()  # host sync
        clipped: dict[str, None] = {}
        for unit, factor, low in zip(units, factors, lowest, strict=True):
            if low < 1:
                _multiply(unit.memory, factor, low)
                clipped[unit.name] = None
        return result_of(gradients, whole, after, dropped, clipped=list(clipped))

    def _factors(self, weight: Tensor, largest: Tensor, ratio: Tensor) -> Tensor:
        """1 for a unit that is small enough."""
        weights, _ = _norms(weight)
        # A bad weight, or one that is too large to be squared, allows no more than a tiny one.
        weights = torch.where(weights.isfinite(), weights, 0.0).clamp(min=self.eps)
        limits = self.ratio * weights
        return torch.where(largest * ratio > limits, limits / largest / ratio, 1.0)


class Unit(NamedTuple):
    """Units along the first dimension: what is measured, its weights, and what is multiplied."""

    name: str
    gradient: Tensor
    weight: Tensor
    memory: Tensor


def _units(gradient: Gradient) -> Iterator[Unit]:
    for part, weight in zip(gradient.memory, _weights(gradient), strict=True):
        # What was expanded cannot be written as a whole.
        steps = zip(part.stride(), part.shape, strict=True)
        has_repeats = any(not step and size > 1 for step, size in steps)
        is_whole = part.dim() < 2 or part.shape != weight.shape or has_repeats
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
        return (param[tensor._indices()[0]],)  # indices() refuses what is not coalesced
    weights = list(plain_parts(param))
    return weights if len(weights) == len(gradient.memory) else [param] * len(gradient.memory)


def _real(part: Tensor) -> Tensor:
    """The same memory; the norm of a complex number is that of its two parts."""
    if not part.is_complex():
        return part
    return torch.view_as_real(part.conj() if part.is_conj() else part)


def _norms(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of each unit as largest and ratio, whose product it is: see `Norm`.

    True unless one overflows; where one underflows, it is far below any limit.
    """
    inner = tuple(range(1, rows.dim()))
    norms = vector_norm(rows, dim=inner, keepdim=True, dtype=exact_dtype(rows))
    return norms.to(wide(rows)), torch.ones((), device=rows.device)


def _true_norms(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same, true for finite elements of any size."""
    inner, rows = tuple(range(1, rows.dim())), rows.to(wide(rows))
    largest = vector_norm(rows, math.inf, dim=inner, keepdim=True)
    largest = largest.clamp(min=torch.finfo(rows.dtype).tiny)
    return largest, vector_norm(rows / largest, dim=inner, keepdim=True)


def _joint(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all units of all tensors; not finite when one of them is not."""
    if not norms:
        return torch.zeros(())
    together = torch.cat([own.to(norms[0].device).flatten() for own in norms])
    joint: Tensor = vector_norm(together)
    return joint


def _multiply(memory: Tensor, factor: Tensor, lowest: float) -> None:
    factor = factor.reshape([-1] + [1] * (memory.dim() - 1))
    dtype = exact_dtype(memory)
    if lowest > torch.finfo(dtype).tiny:
        memory.mul_(factor.to(dtype))
    else:
        memory.copy_(memory.to(wide(memory)) * factor)


_RULES: dict[str, type[Rule]] = {
    rule.mode: rule for rule in (Robust, Percentile, ZScore, PerUnit, PerTensor)
}
