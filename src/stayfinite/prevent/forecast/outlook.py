"""Trends and spikes in what was measured of training; no torch.

All sizes are on a log scale, in doublings. A trend is the median of the slopes between all pairs of
samples (Theil-Sen), which neither a spike nor a missing value throws off. Divergence accelerates,
so the growth of the slope counts too: with slope b, growing by the factor exp(r) in each step, the
room h is used up after log(1 + r h / b) / r steps. A slope that falls, as that of a power does, is
taken to fall like 1 / (1 + q t), and the room is used up after (exp(q h / b) - 1) / q steps.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stayfinite.prevent.forecast.divergence import LOSSES, Divergence, Learned, learned
from stayfinite.records import Forecast, Severity, Signal

Array = np.ndarray
_Known = float | None

_LONG, _SHORT = 16, 12  # samples kept: those of every so many steps, and the last of any kind
_FEW = 5  # samples that make a trend
_NEAR = 24  # steps back that the short trend looks
_SPANS = (4, 6, 8, 12)  # numbers in which something may have climbed
_BEFORE = 64  # losses before them, which tell what was usual
_BEGINNING = 8  # losses
_SMALLEST = 0.25  # doublings; less is no climb
_FALLEN = 0.7  # what of a loss is left that still falls
_TOP, _NORM, _GRADIENT, _UPDATE = 1, 2, 3, 4
_KINDS: dict[str, int] = {
    "activation": _TOP,
    "grad_norm": _NORM,
    "gradient": _GRADIENT,
    "update_ratio": _UPDATE,
}
_QUIET = 0.1  # doublings by which anything varies
_LEAST = math.log2(2.0**-126)
_BESIDE: dict[str, tuple[str, Callable[[float], str]]] = {
    "update_ratio": ("an update moves the weights by", "{:.2g} of their size".format),
    "adam_denominator": ("of Adam's denominators eps is", "{:.2g}".format),
    "attention_logits": ("attention logits are up to", "{:.3g}".format),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One signal of one module or parameter; `limit` is the end of its dtype."""

    signal: Signal
    dtype: str | None = None
    limit: float = math.inf


@dataclass(frozen=True, kw_only=True)
class TrendRules:
    """When a trend is told. The figures are from the runs of benchmarks/forecast.py."""

    every: int = 32  # steps between two samples while all is quiet
    most_every: int = 128  # where a step is so short that a sample takes too large a part of it
    share: float = 0.0014  # of the time; `Pace` keeps to it. torch's own hooks take more than that
    dense_early: int = 32  # at first every step is sampled, then every fourth
    warm_up: int = 48  # steps in which a trend must be extreme, or a climb's end near
    alert: int = 8  # steps that are all sampled when something rises
    credit: int = 16  # such steps in reserve
    earned: float = 0.1  # that come back with each sample
    least_rise: float = 2.0  # doublings
    rise_share: float = 0.02  # of the room that is left
    least_z: float = 6.0  # the rise, as a multiple of the noise, before the correction
    farthest: float = 2.0  # how far a trend reaches, as a multiple of the steps that show it
    slowest: float = 3.5  # an end is expected within so many times what the slope of now says
    surely: float = 4.0  # times the noise that has been risen in each half, beyond doubt
    horizon: int = 400
    early_horizon: int = 96  # of a climb, while it warms up
    extreme_rise: float = 6.0
    extreme_left: float = 12.0
    low: float = 0.3
    early: float = 2.0
    faster: float = 3.0  # it may be over within so many times the steps that show it
    high: float = 2.2
    calm: int = 64  # steps without a trend after which the next one is a new one
    # Climbs, in doublings: of the loss, together with the largest activation or the gradient norm.
    loss_climb: float = 1.0
    top_climb: float = 1.0
    small_climb: float = 0.75  # of the norm, or of the largest activation if its end is near
    climb_noise: float = 4.0  # the same, as a multiple of the noise
    near: float = 40.0  # steps
    far: float = 32.0  # doublings of room; a trend so far from its end needs a loss that climbs
    far_climb: float = 0.25
    brink: float = 2.0  # doublings of room that any batch may use up
    brink_left: float = 40.0  # steps in which that is expected, and the most
    brink_high: float = 200.0
    steady: float = 0.25  # part of a rise that is more than its largest jump
    extreme_score: float = 2.0  # of divergence, above the least that is told, while it warms up
    least_score: float = -2.5  # of divergence; below it no other sign counts
    least_score_far: float = 0.0  # the same for what is so far from its end


@dataclass(frozen=True, kw_only=True)
class Trend:
    """What a row is heading for: room in doublings, slope in doublings per step, steps left.

    `row` is None where it is the whole training that is about to diverge.
    """

    row: int | None
    step: int
    value: float
    room: float
    rise: float
    jump: float  # the largest part of the rise, from one sample to the next
    slope: float
    growth: float
    left: float
    low: float
    high: float
    samples: int
    span: int
    z: float


def time_left(room: float, slope: float, growth: float) -> float:
    """Steps until the room is used up, if the slope goes on growing, or falling, as it does.

    >>> time_left(10.0, 1.0, 0.0)
    10.0
    >>> time_left(10.0, 1.0, 0.5) < 4 and time_left(10.0, 1.0, -0.5) > 200
    True
    """
    if not slope > 0:
        return math.inf
    bend = growth * room / slope
    if abs(bend) < 1e-3:
        return room / slope
    if bend > 0:
        return math.log1p(bend) / growth
    return math.expm1(-bend) / -growth if bend > -50 else math.inf


def median_slope(steps: Array, values: Array) -> float:
    """The median of the slopes between all pairs; NaN with fewer than two samples.

    >>> float(median_slope(np.arange(5.0), np.array([0.0, 1.0, 2.0, 99.0, 4.0])))
    1.0
    """
    if len(steps) < 2:
        return math.nan
    later, earlier = _pairs(len(steps))
    slopes = (values[later] - values[earlier]) / (steps[later] - steps[earlier])
    return float(_medians(slopes[None])[0])


@functools.cache
def _pairs(count: int) -> tuple[Array, Array]:
    """The places of all pairs, the later one first."""
    earlier, later = np.triu_indices(count, 1)
    return later, earlier


def _medians(table: Array) -> Array:
    """Of each row; a tenth of what np.median takes for so few columns."""
    ordered, count = np.sort(table, axis=1), table.shape[1]
    middle: Array = (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2
    return middle


def climb(values: Sequence[float]) -> tuple[float, float]:
    """How far the last number is above what was usual, without its largest jump and with it.

    Each is that of the last 4, 6, 8 or 12 numbers, whichever is most; 0 if it is less than a
    quarter. A change of data or of the rate is a jump; a divergence goes on and on.

    >>> climb([1.0] * 8 + [9.0] * 4), climb([1.0] * 8 + [2.0, 3.0, 5.0, 9.0])
    ((0.0, 8.0), (4.0, 8.0))
    """
    most = most_with = 0.0
    if not values or values[-1] <= _least_usual(values) + _SMALLEST:
        return 0.0, 0.0
    for span in _SPANS:
        before = len(values) - span
        if before < 3:
            break
        last = values[-1]
        ordered, newest = sorted(values[:before]), sorted(values[max(0, before - 4) : before])
        # The second covers a new level that is not old enough for the first.
        usual = top = max(ordered[(9 * (before - 1)) // 10], newest[len(newest) // 2])
        if last - usual <= most:
            continue
        jump = 0.0
        for value in values[before:]:
            if value > top:
                jump, top = max(jump, value - top), value
        most, most_with = max(most, last - usual - jump), max(most_with, last - usual)
    return most, most_with


def _least_usual(values: Sequence[float]) -> float:
    """What is usual before a span is not less than this: the same rank among all of them."""
    before = len(values) - _SPANS[-1]
    return sorted(values)[(9 * (before - 1)) // 10] if before > 2 else -math.inf


class Pace:
    """How many steps apart samples are, so that they take no more than their share of the time.

    Both the time of a step and that of a sample are the least of the last eight: what else runs on
    the machine makes them longer, never shorter.

    >>> pace = Pace(TrendRules(every=16, share=0.01))
    >>> pace.steps.extend([0.001] * 8)
    >>> pace.sampled(0.0003)
    >>> pace.every
    32
    """

    def __init__(self, rules: TrendRules) -> None:
        self._rules = rules
        self.steps: deque[float] = deque(maxlen=8)  # seconds of steps without a sample
        self._samples: deque[float] = deque(maxlen=8)
        self.every = rules.every

    def sampled(self, seconds: float) -> None:
        """A sample took so long, in all."""
        self._samples.append(seconds)
        if len(self.steps) < 8:
            return
        rules, allowed = self._rules, self._rules.share * min(self.steps)
        every = rules.every
        while every < rules.most_every and min(self._samples) > every * allowed:
            every *= 2
        self.every = every


class SpikeDetector:
    """Whether a number is far above its recent ones, by their median and deviation.

    Non-finite numbers are passed over, so none of them spoils the window. After `shift` spikes in a
    row the level has changed: the window begins anew with them. One spike is told for one onset.

    >>> detector = SpikeDetector()
    >>> [detector.add(x) for x in [1.0, 1.1] * 16 + [float("nan"), 9.0, 9.1, 1.0]][-4:]
    [False, True, False, False]
    """

    def __init__(
        self, *, window: int = 64, width: float = 10.0, least: int = 24, shift: int = 8
    ) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self._width, self._least, self._shift = width, least, shift
        self._above = self._age = 0
        self.limit = math.inf  # above it is a spike
        self.raised = math.inf  # above it a closer look is worth it
        self.usual = math.nan
        self.spread = math.nan

    def add(self, value: float) -> bool:
        """Take one more number; whether a spike begins with it."""
        if value - value != 0:
            return False
        self._values.append(value)
        self._age += 1
        if value > self.limit:
            self._above += 1
            if self._above >= self._shift:
                kept = list(self._values)[-self._shift :]
                self._values.clear()
                self._values.extend(kept)
                self._above = 0
                self._least = self._shift
                self._learn()
                return False
            return self._above == 1
        if self._above:
            self._above -= 1
        if self._age % 16 == 0 or self._age == self._least:
            self._learn()
        return False

    def _learn(self) -> None:
        if len(self._values) < self._least:
            self.limit = self.raised = math.inf
            return
        values = np.fromiter(self._values, dtype=float)
        values.sort()
        middle = self.usual = float(values[len(values) // 2])
        deviations = np.abs(values - middle)
        deviations.sort()
        spread = 1.4826 * float(deviations[len(deviations) // 2])
        self.spread = max(spread, 0.02 * abs(middle), 1e-12)
        self.limit = middle + self._width * self.spread
        self.raised = middle + 0.4 * self._width * self.spread


class Climbs:
    """Whether several signals climb at once, as they do when training diverges.

    A climb of one alone is told only if its end is near: a loss has heavy tails, the activations of
    a healthy model grow while it learns, and a norm swings where the rate is at its edge. `top` is
    the largest activation, of whatever module.
    """

    def __init__(self, rules: TrendRules) -> None:
        self._rules = rules
        self.losses: deque[float] = deque(maxlen=LOSSES)  # of all steps, no signs
        self._least = 0.0  # far below the losses of the beginning, a ratio of losses says little
        self._steps: deque[int] = deque(maxlen=2 * _SPANS[-1])
        self._tops: deque[float] = deque(maxlen=2 * _SPANS[-1])
        self._norms: deque[float] = deque(maxlen=2 * _SPANS[-1])
        self.is_climbing = self.is_suspect = False
        self.is_at_brink, self.of_loss = False, 0.0
        self._rooms: deque[float] = deque(maxlen=4)

    def learn(self, step: int, *, top: float | None, norm: float | None, room: float) -> None:
        """A sample, in doublings; None is what it does not have."""
        rules = self._rules
        if top is not None:
            self._tops.append(top)
            self._steps.append(step)
        if norm is not None:
            self._norms.append(norm)
        losses, self.of_loss = [*self.losses][-_BEFORE - _SPANS[-1] :], 0.0
        if len(losses) >= _BEGINNING and not self._least:
            usual = sorted(losses[:_BEGINNING])[_BEGINNING // 2]
            self._least = max(usual / 8, 1e-6)
        if losses and losses[-1] > _least_usual(losses) * 2**_SMALLEST:
            least = self._least or 1e-6
            self.of_loss, _ = climb([math.log2(max(loss, least)) for loss in losses])
        of_top, with_jump = climb([*self._tops])
        self.is_climbing = False
        if self.of_loss >= rules.loss_climb:
            # Samples may lie far apart, so that a climb of several steps looks like a jump in them.
            _, of_norm = climb([*self._norms])
            of_norms = self._is_clear(of_norm, self._norms)
            self.is_climbing = with_jump >= rules.top_climb or of_norms
        if self._is_clear(of_top, self._tops) and self._steps_left(room) <= rules.near:
            self.is_climbing = self.is_climbing or not self.loss_falls()
        self._rooms.append(room)
        self.is_at_brink = len(self._rooms) > 2 and sorted(self._rooms)[2] <= rules.brink
        self.is_suspect = max(self.of_loss / rules.loss_climb, of_top / rules.top_climb) >= 0.5

    def _is_clear(self, climbed: float, values: Sequence[float]) -> bool:
        """Whether this climb of these is no noise."""
        if climbed < self._rules.small_climb:
            return False
        changes = sorted(abs(b - a) for a, b in itertools.pairwise([*values][: -_SPANS[0]]))
        noise = changes[len(changes) // 2] if changes else 0.0
        return climbed >= self._rules.climb_noise * noise

    def _steps_left(self, room: float) -> float:
        """Until activations overflow, if they go on as in the last six samples."""
        if len(self._tops) < 7 or not self._tops[-1] > self._tops[-7]:
            return math.inf
        return room * (self._steps[-1] - self._steps[-7]) / (self._tops[-1] - self._tops[-7])

    def loss_falls(self) -> bool:
        """Whether most of the last four are far below the median of those before."""
        losses = [*self.losses][-_BEFORE - _SPANS[-1] :]
        if len(losses) < 2 * _SPANS[0]:
            return False
        before, newest = sorted(losses[: -_SPANS[0]]), sorted(losses[-_SPANS[0] :])
        return newest[2] < _FALLEN * before[len(before) // 2]


@dataclass
class Outlook:
    """What is known of the rows of one training, and which of them is heading for its limit.

    `learn` takes a sample and gives the trends that are to be told, one for each onset. `saw_loss`
    takes the loss of a step. `is_due` says whether a step is to be sampled: every so many steps,
    and all of them for a while when something rises.
    """

    rows: list[Row]
    rules: TrendRules = field(default_factory=TrendRules)
    divergence: Divergence = field(default_factory=Divergence)
    learned: Learned | None = field(default_factory=learned)

    def __post_init__(self) -> None:
        self._limits = np.zeros(0)
        self._long = np.zeros((0, _LONG), dtype=np.float32)
        self._short = np.zeros((0, _SHORT), dtype=np.float32)
        self._long_steps: deque[int] = deque(maxlen=_LONG)
        self._short_steps: deque[int] = deque(maxlen=_SHORT)
        self._base, self._noise = np.zeros(0), np.zeros(0)
        self._is_bad = np.zeros(0, dtype=bool)
        self._told_until = self._diverging_until = -1
        self._last_told: Trend | None = None
        self.score = -math.inf  # of divergence, a logarithm of odds
        self._expected = math.inf  # the last step in which the end was expected
        self._alert_until = -1
        self._credit = float(self.rules.credit)
        self._pending: tuple[int | None, int] | None = None  # the row of a trend, and when
        self._has_trend = False
        self._signals = np.zeros(0, dtype=np.int8)
        self._climbs = Climbs(self.rules)
        self.losses = SpikeDetector()
        self._raised = 0
        self.pace = Pace(self.rules)

    def is_due(self, step: int) -> bool:
        """Whether this step is to be sampled."""
        rules = self.rules
        if step < rules.warm_up:
            return step < rules.dense_early or step % 4 == 0 or step < self._alert_until
        return step % self.pace.every == 0 or step < self._alert_until

    def _look_closer(self, step: int, *, is_urgent: bool = False) -> None:
        least = -self.rules.credit if is_urgent else 1
        if self._credit >= least and self._alert_until <= step + 1:
            self._alert_until = step + 1 + self.rules.alert
            self._credit -= self.rules.alert

    def saw_loss(self, step: int, loss: float) -> bool:
        """The loss of a step; whether a spike begins with it."""
        losses = self.losses
        is_spike = losses.add(loss)
        if loss - loss == 0:
            self._climbs.losses.append(abs(loss))
        if loss > losses.raised:
            self._raised += 1
            is_urgent = loss > losses.limit
            if self._raised >= 2 or is_urgent:
                self._look_closer(step, is_urgent=is_urgent)
        else:
            self._raised = 0
        return is_spike

    def learn(
        self, step: int, rows: Array, values: Array, *, rate: float | None = None
    ) -> Trend | None:
        """A sample; the trend that is to be told now, if there is one."""
        with np.errstate(divide="ignore", invalid="ignore"):
            sizes = np.log2(values)
        self._grow(len(self.rows))
        is_good = np.isfinite(sizes) | (values == 0)
        self._is_bad[rows] = ~is_good  # until it is finite again, as after a skipped update
        rows, sizes = rows[is_good], np.maximum(sizes[is_good], _LEAST)
        self._add(step, rows, sizes)
        self._credit = min(float(self.rules.credit), self._credit + self.rules.earned)
        self._watch_climbs(step, rows, sizes, rate)
        self._judge(step)
        told = self._rising(step) or self._diverging(step)
        if told is not None:
            self._last_told = told
            self._alert_until = step + 1 + 4 * self.rules.alert  # does what is done about it help?
        return told

    def _rising(self, step: int) -> Trend | None:
        """A row that is heading for its limit, if it is to be told now."""
        risen = self._short[:, -1] - self._base
        room = self._limits - self._short[:, -1]
        rules = self.rules
        with np.errstate(invalid="ignore"):
            needed = np.maximum(
                np.maximum(rules.least_rise, rules.rise_share * room),
                self._correction() * self._noise,
            )
            is_open = ~self._is_bad & np.isfinite(room)
            least = _QUIET if self._climbs.is_climbing else 0.5 * needed
            worth = (risen > least) & is_open
            if not worth.any() and not self._climbs.is_at_brink:
                self._has_trend = False
                return None
            if (risen > 0.7 * needed).any():
                self._look_closer(step)
        if step <= self._told_until:  # it is the same onset as long as something rises
            self._told_until = step + rules.calm
        chosen = np.flatnonzero(worth)
        if len(chosen) > 8:
            chosen = chosen[np.argsort(-risen[chosen] / np.maximum(room[chosen], 1.0))[:8]]
        found = [t for row in chosen for t in self._trends(int(row), step, room)]
        if self._climbs.is_at_brink:
            found.append(self._brink(step, room))
        return self._told(step, found)

    def _judge(self, step: int) -> None:
        """How much all of it looks like trainings that diverged."""
        features = self.divergence.features(self._climbs.losses)
        if self.learned is not None and features is not None:
            self.score = self.learned.trees.score(features)

    def _diverging(self, step: int) -> Trend | None:
        """That it looks like them, if it is to be told now."""
        known, rules = self.learned, self.rules
        if known is None or step <= max(self._told_until, self._diverging_until):
            return None
        if self.score <= known.least + (rules.extreme_score if step < rules.warm_up else 0.0):
            return None
        self._diverging_until = step + math.ceil(known.high)
        return Trend(
            row=None,
            step=step,
            value=self.score,
            room=0.0,
            rise=self.score - known.least,
            jump=0.0,
            slope=0.0,
            growth=0.0,
            left=known.left,
            low=known.low,
            high=known.high,
            samples=len(self._short_steps),
            span=int(self._short_steps[-1] - self._short_steps[0]),
            z=math.inf,
        )

    def _brink(self, step: int, room: Array) -> Trend:
        """The activation that any batch may make overflow, whether it rises or not."""
        row = int(np.nanargmin(np.where(self._signals == _TOP, room, math.inf)))
        size = float(self._short[row, -1])
        return Trend(
            row=row,
            step=step,
            value=2.0**size,
            room=float(room[row]),
            rise=size - float(self._base[row]),
            jump=0.0,
            slope=0.0,
            growth=0.0,
            left=self.rules.brink_left,
            low=0.0,
            high=self.rules.brink_high,
            samples=len(self._short_steps),
            span=int(self._short_steps[-1] - self._short_steps[0]),
            z=math.inf,
        )

    def _watch_climbs(self, step: int, rows: Array, sizes: Array, rate: float | None) -> None:
        """Give what may climb together to those who know."""
        signals = self._signals[rows]
        tops, norms = sizes[signals == _TOP], sizes[signals == _NORM]
        if not len(norms):  # of gradients of several kinds there is no norm
            norms = sizes[signals == _GRADIENT]
        room = math.inf
        if len(tops):
            room = float((self._limits[rows[signals == _TOP]] - tops).min())
        top = float(tops.max()) if len(tops) else None
        norm = float(norms.max()) if len(norms) else None
        self._climbs.learn(step, top=top, norm=norm, room=room)
        updates = sizes[signals == _UPDATE]
        self.divergence.learn(
            step,
            (
                float(updates[0]) if len(updates) and updates[0] > _LEAST else math.nan,
                math.nan if norm is None else norm,
                math.nan if top is None else top,
                math.nan if top is None else room,
                math.log2(rate) if rate is not None and rate > 0 else math.nan,
            ),
            keep=self._is_regular(step),
        )
        if self._climbs.is_suspect:
            self._look_closer(step)

    def beside(self) -> Iterator[str]:
        """What has at least doubled and has no limit of its own, in sentences."""
        for number, row in enumerate(self.rows):
            size, usual = self._short[number, -1], self._base[number]
            if row.signal in _BESIDE and size - usual >= 1:
                now, before = (_BESIDE[row.signal][1](2.0**each) for each in (size, usual))
                yield f"{_BESIDE[row.signal][0]} {now}; {before} is usual"

    def _correction(self) -> float:
        """More rows are watched: chance has more tries."""
        return self.rules.least_z + math.sqrt(2 * math.log(max(1, len(self.rows))))

    def _grow(self, count: int) -> None:
        more = count - len(self._limits)
        if more <= 0:
            return
        new = self.rows[-more:]
        limits = [math.log2(row.limit) if row.limit < math.inf else math.inf for row in new]
        self._limits = np.append(self._limits, limits)
        self._long = np.vstack([self._long, np.full((more, _LONG), np.nan, dtype=np.float32)])
        self._short = np.vstack([self._short, np.full((more, _SHORT), np.nan, dtype=np.float32)])
        self._base = np.append(self._base, np.full(more, np.nan))
        self._noise = np.append(self._noise, np.full(more, _QUIET))
        self._is_bad = np.append(self._is_bad, np.zeros(more, dtype=bool))
        kinds = [_KINDS.get(row.signal, 0) for row in new]
        self._signals = np.append(self._signals, np.array(kinds, dtype=np.int8))

    def _add(self, step: int, rows: Array, sizes: Array) -> None:
        self._short_steps.append(step)
        self._short[:, :-1] = self._short[:, 1:]  # a row that was not measured keeps its last
        self._short[rows, -1] = sizes
        if self._is_regular(step):
            self._long_steps.append(step)
            self._long[:, :-1] = self._long[:, 1:]
            self._long[rows, -1] = sizes
            self._learn_usual()

    def _is_regular(self, step: int) -> bool:
        """Whether this sample is one of those that lie apart."""
        return step % (4 if step < self.rules.warm_up else self.pace.every) == 0

    def _learn_usual(self) -> None:
        count = min(len(self._long_steps), _LONG)
        known = self._long[:, -count:]
        with np.errstate(all="ignore"):
            filled = np.where(np.isnan(known), known[:, -1:], known)
            self._base = _medians(filled[:, : max(1, count - 1)])
            if count >= 4:
                change = filled[:, 1:] - filled[:, :-1]
                spread = _medians(np.abs(change - _medians(change)[:, None]))
                self._noise = np.maximum(_QUIET, 1.05 * spread)

    def _trends(self, row: int, step: int, room: Array) -> Iterable[Trend]:
        windows = (
            (self._short_steps, self._short, step - _NEAR),
            (self._long_steps, self._long, -1),
        )
        for steps, ring, since in windows:
            at = np.array(steps, dtype=float)
            values = ring[row, -len(at) :]
            is_known = ~np.isnan(values) & (at >= since)
            at, values = at[is_known], values[is_known]
            trend = self._trend(row, step, at, values, float(room[row]))
            if trend is not None:
                yield trend

    def _trend(self, row: int, step: int, at: Array, values: Array, room: float) -> Trend | None:
        if len(at) < _FEW or at[-1] != step:
            return None
        half = len(at) // 2
        early = median_slope(at[: half + 1], values[: half + 1])
        late = median_slope(at[half:], values[half:])
        last = float((values[-1] - values[-3]) / (at[-1] - at[-3]))
        slope = min(last, 2 * late) if last > late else (late + last) / 2
        if not slope > 0 or not late > 0:
            return None
        noise = float(self._noise[row])
        growth = 0.0
        if abs(slope - early) * (at[-1] - at[half]) > 2 * noise:  # else it is not known to change
            apart = float(np.mean(at[half:]) - np.mean(at[: half + 1]))
            ratio = slope / early if early > 0 else 4.0
            growth = math.log(min(max(ratio, 0.25), 4.0)) / max(apart, 1.0)
        # The end lies between that of the slope of now and that of one which goes on changing.
        straight, bent = room / slope, time_left(room, slope, growth)
        rise = float(values[-1] - self._base[row])
        jump = float(np.diff(np.maximum.accumulate(values)).max())
        if growth <= 0:  # what grows as a power does takes longer and longer to double
            bent = max(bent, time_left(room, slope, -slope / max(rise, 1.0)))
        sooner, later = sorted((straight, min(bent, self.rules.slowest * straight)))
        quick = min(sooner, self.rules.faster * float(at[-1] - at[0]))
        left = math.sqrt((quick if self._climbs.is_climbing else sooner) * later)
        risen_before, risen_since = early * (at[half] - at[0]), late * (at[-1] - at[half])
        if growth > 0 and risen_since > risen_before > self.rules.surely * noise:
            left = sooner  # that it rises faster and faster is beyond doubt; no jump looks so
        return Trend(
            row=row,
            step=step,
            value=float(2.0 ** min(float(values[-1]), 1023.0)),
            room=room,
            rise=rise,
            jump=jump,
            slope=slope,
            growth=growth,
            left=left,
            low=max(0.0, self.rules.low * quick - self.rules.early),
            high=self.rules.high * later + 2,
            samples=len(at),
            span=int(at[-1] - at[0]),
            z=rise / noise,
        )

    def is_telling(self, trend: Trend) -> bool:
        """Whether a trend is strong enough to be told."""
        rules, is_extreme = self.rules, self._is_extreme(trend)
        if trend.step < rules.warm_up:
            return is_extreme
        needed = max(rules.least_rise, rules.rise_share * trend.room)
        if trend.rise < needed or trend.z < self._correction():
            return False
        if trend.room > rules.far and self._climbs.of_loss < rules.far_climb:
            return False
        if not is_extreme and self._climbs.loss_falls():
            return False
        if trend.rise - trend.jump < rules.steady * trend.rise:
            return False
        reach = min(rules.farthest * trend.span, rules.horizon)
        return is_extreme or trend.left <= reach

    def _is_extreme(self, trend: Trend) -> bool:
        rules = self.rules
        return trend.rise >= rules.extreme_rise and trend.left <= rules.extreme_left

    def _is_plausible(self, trend: Trend) -> bool:
        """Whether all of it looks a little like trainings that diverged, as far as is known."""
        rules = self.rules
        if self.learned is None or trend.room <= rules.brink:
            return True
        if self.score == -math.inf:  # with few losses, nobody can say whether it only begins
            return trend.step >= rules.warm_up or self._is_extreme(trend)
        least = rules.least_score_far if trend.room > rules.far else rules.least_score
        return self.score >= least

    def _told(self, step: int, found: list[Trend]) -> Trend | None:
        climbs = self._climbs
        is_sure = climbs.is_climbing or climbs.is_at_brink
        rules = self.rules
        horizon = rules.horizon if step >= rules.warm_up else rules.early_horizon
        telling = [
            trend
            for trend in found
            if self._is_plausible(trend)
            and ((is_sure and trend.left <= horizon) or self.is_telling(trend))
        ]
        if not telling:
            self._has_trend = bool(found)
            return None
        first = min(telling, key=lambda trend: trend.left)
        if first.room <= rules.brink:  # so near to the end a slope says little
            first = replace(first, high=max(first.high, rules.brink_left))
        is_new = step > self._told_until
        pending, self._pending = self._pending, (first.row, step)
        is_confirmed = is_sure or (pending is not None and step - pending[1] <= self.pace.every)
        if is_new and not is_confirmed:
            self._look_closer(step)
            return None
        self._has_trend = True
        self._told_until = step + rules.calm
        is_overdue = step > self._expected  # what was told has not come, and it still rises
        if not is_new and not is_overdue:
            return None
        self._expected = step + max(min(first.high, 3.0 * first.left), 64.0)
        return first

    @property
    def room(self) -> float | None:
        """Doublings that are left of the last forecast; of a divergence, how far its score is off.

        As it was measured last; None before anything was told.
        """
        if self._last_told is None:
            return None
        row = self._last_told.row
        if row is None:
            return -self.score
        return float(self._limits[row] - self._short[row, -1])

    @property
    def is_rising(self) -> bool:
        """Whether what was told last goes on: a trend, or that it looks like a divergence."""
        if self._last_told is None:
            return False
        if self._last_told.row is None:
            return self.learned is not None and self.score > self.learned.least
        return self._has_trend


class ScaleWatch:
    """A loss scale that halves and halves is on its way to 1, below which no scaler helps.

    At the beginning a scaler looks for its scale, which is no trend.
    """

    LAST, LOW = 1.0, 4.0
    HIGH = 2.0**13  # above it, a scale that falls looks for its place

    def __init__(self) -> None:
        self._skips: deque[tuple[int, float]] = deque(maxlen=32)  # with the scale of each
        self._good = 0  # updates in a row
        self._is_found = False
        self._told_until = -1

    def stepped(self, step: int, *, skipped: bool, scale: float | None) -> Forecast | None:
        """An update was made or skipped; the scale needs to be known where it was skipped."""
        if not skipped:
            self._good += 1
            if self._good == 16:
                self._is_found = True
            return None
        self._good = 0
        if scale is None or not scale > 0:
            return None
        self._skips.append((step, scale))
        if step <= self._told_until or scale > self.HIGH:
            return None
        recent = [each for each in self._skips if each[0] > step - 32]
        halvings = math.log2(scale / self.LAST)
        if scale <= self.LOW:  # each halving may be the last one, however far apart they are
            recent = [*self._skips][-2:]
            per_step = 1 / max(1, step - recent[0][0])
            halvings += 1
        else:
            per_step = self._fall(recent)
        if not per_step > 0:
            return None
        self._told_until = step + 32
        left = halvings / per_step
        row = Row(signal="loss_scale", limit=self.LAST)
        return forecast_of(
            row,
            where="",
            step=step,
            value=scale,
            slope=-per_step,
            between=(0.3 * left, left, 3 * left + 4),
            evidence=(f"{len(recent)} updates were skipped in the last {step - recent[0][0] + 1}",),
        )

    def _fall(self, recent: list[tuple[int, float]]) -> float:
        """Halvings in a step; 0 where it is none to speak of."""
        (began, first), (step, scale) = recent[0], recent[-1]
        if len(recent) < (4 if self._is_found else 3) or not (self._is_found or scale < 64):
            return 0.0
        fallen = math.log2(first / scale)
        # One that doubles often overflows often, and is where it was.
        is_back = fallen < 0.75 * (len(recent) - 1)
        return 0.0 if is_back else fallen / max(1, step - began)


_SOON = 20  # steps


def forecast_of(
    row: Row,
    *,
    where: str,
    step: int,
    value: float,
    slope: float,
    between: tuple[float, float, float],
    evidence: tuple[str, ...] = (),
    rank: int = 0,
) -> Forecast:
    """The record; `between` has the fewest, the expected and the most steps that are left."""
    low, left, high = math.floor(between[0]), round(between[1]), math.ceil(between[2])
    severity: Severity = "critical" if left <= _SOON else "warning"
    why = ""
    if row.signal == "divergence" and evidence:  # of a score, what stands out is all there is
        why, evidence = f": {evidence[0]}", evidence[1:]
    return Forecast(
        step=step,
        signal=row.signal,
        where=where,
        dtype=row.dtype,
        value=value,
        limit=row.limit if row.signal != "divergence" else None,
        slope=slope,
        steps_left=left,
        steps_low=low,
        steps_high=high,
        severity=severity,
        message=f"{_subject(row, where)} in about {left} steps ({low}-{high}){why}",
        time=time.time(),
        rank=rank,
        evidence=evidence,
    )


def _subject(row: Row, where: str) -> str:
    dtype = row.dtype or "float32"
    if row.signal == "activation":
        return f"{where or 'the output of the model'} overflows {dtype}"
    if row.signal == "gradient":
        return f"the gradient of {where or 'a parameter'} overflows {dtype}"
    if row.signal == "attention_logits":
        return f"the logits of attention overflow {dtype}"
    if row.signal == "loss_scale":
        return "the loss scale falls to 1, where no scaler helps,"
    if row.signal == "divergence":
        return "training will probably diverge"
    names = {"grad_norm": "the norm of the gradients", "loss": "the loss"}
    return f"{names.get(row.signal, row.signal)} overflows {dtype}"


def forecast_from(
    trend: Trend, row: Row, *, where: str, outlook: Outlook | None, rank: int = 0
) -> Forecast:
    """The record of a trend; with an outlook, it says what else has changed."""
    return forecast_of(
        row,
        where=where,
        step=trend.step,
        value=trend.value,
        slope=trend.slope,
        between=(trend.low, trend.left, trend.high),
        evidence=evidence_of(trend, outlook),
        rank=rank,
    )


def evidence_of(trend: Trend, outlook: Outlook | None = None) -> tuple[str, ...]:
    """What the trend was read from, in sentences, and what else has changed with it."""
    if trend.row is None:
        return () if outlook is None else tuple(outlook.divergence.signs())
    speed = f"{trend.slope:.2g} doublings a step"
    grows = (
        "" if abs(trend.growth) < 1e-3 else f", the slope grows {100 * trend.growth:+.0f}% a step"
    )
    return (
        f"{trend.samples} samples over {trend.span} steps: {speed}{grows}",
        f"{2.0 ** min(trend.rise, 1000.0):.3g} times its usual size; "
        f"{trend.room:.1f} doublings are left",
        *([] if outlook is None else outlook.beside()),
    )


def spike_of(
    signal: Signal, *, step: int, value: float, detector: SpikeDetector, rank: int = 0
) -> Forecast:
    """The record of a jump."""
    what = "the loss" if signal == "loss_spike" else "the norm of the gradients"
    return Forecast(
        step=step,
        signal=signal,
        where="loss" if signal == "loss_spike" else "",
        value=value,
        limit=detector.limit,
        severity="info",
        message=f"{what} jumped to {value:.3g}; {detector.usual:.3g} is usual",
        time=time.time(),
        rank=rank,
    )


def foretold(
    steps: Iterable[tuple[int, _Known, _Known, _Known]],
    samples: Mapping[int, Sequence[tuple[str, float]]],
    rules: TrendRules | None = None,
) -> list[Forecast]:
    """What could have been known of a recorded run: from its steps, one by one, and samples.

    A step has its number, loss, norm of the gradients and learning rate. A sample has the headroom
    of each gradient, in doublings; what a run directory keeps. Steps are looked at as far apart as
    they are measured in a training, since the score was learned so.
    """
    rules = rules or TrendRules(earned=1.0)  # a closer look takes no time of a training
    largest = float(np.finfo("f4").max)
    rows = [Row(signal="loss", limit=largest), Row(signal="grad_norm", limit=largest)]
    outlook, numbers, names = Outlook(rows, rules), dict[str, int](), ["loss", ""]
    last, told = math.nan, []
    for step, loss, norm, rate in steps:
        is_due = outlook.is_due(step)
        if loss is not None and math.isfinite(loss):
            last = loss
            if outlook.saw_loss(step, loss):
                told.append(spike_of("loss_spike", step=step, value=loss, detector=outlook.losses))
        if not is_due:
            continue
        sizes: dict[int, float] = {}
        if not math.isnan(last):
            sizes[0] = size_of_loss(last, outlook.losses)
        if norm is not None:
            sizes[1] = norm
        for name, room in samples.get(step, ()):
            if name not in numbers:
                numbers[name] = len(rows)
                names.append(name)
                rows.append(Row(signal="gradient", limit=1.0))  # sizes as a part of the limit
            sizes[numbers[name]] = 2.0 ** -min(room, 1000.0)
        at, values = np.array([*sizes], dtype=np.int64), np.array([*sizes.values()])
        trend = outlook.learn(step, at, values, rate=rate)
        if trend is not None:
            row, where = Row(signal="divergence"), ""
            if trend.row is not None:
                row, where = rows[trend.row], names[trend.row]
            told.append(forecast_from(trend, row, where=where, outlook=outlook))
    return told


def size_of_loss(loss: float, usual: SpikeDetector) -> float:
    """Its magnitude; below what is usual it counts as usual, since it may be near 0."""
    return max(abs(loss), 0.0 if math.isnan(usual.usual) else abs(usual.usual), 1e-6)


def possible_forecasts(
    *, in_half: bool, is_scaled: bool, has_adam: bool, is_compiled: bool
) -> tuple[str, ...]:
    """Of what in a training something can be told before it overflows or diverges, a line each.

    >>> possible_forecasts(in_half=True, is_scaled=False, has_adam=False, is_compiled=True)[1]
    'activations: not with torch.compile, since a hook would make it compile again'
    """
    dtype = "float16" if in_half else "float32"
    room = "" if in_half else "; its end is far, so that only a divergence comes near to it"
    compiled = "not with torch.compile, since a hook would make it compile again"
    found = [
        f"gradients, their norm and the loss: when they overflow {dtype}{room}",
        f"activations: {compiled if is_compiled else f'which module overflows {dtype}, and when'}",
    ]
    if is_scaled:
        found.append("the loss scale: when it has fallen to 1")
    found.append(
        "training as a whole: that it will probably diverge, from the loss and from what "
        "gradients, updates and the learning rate do"
    )
    if has_adam:
        found.append("Adam's denominators against eps, and its updates: reported beside a forecast")
    return tuple(found)
