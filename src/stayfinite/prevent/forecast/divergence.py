"""How likely a training is to diverge soon, as a score that was learned from many trainings.

What announces a divergence is rarely one signal: the loss is above its best, updates move the
weights more than they did, the rate still rises. `Divergence` sums that up in a few numbers, most
of them differences of logarithms, so that neither the size of the loss nor that of the model
matters, and decision trees add up to a score. benchmarks/forecast_fit.py grows the trees from
trainings that diverge and from healthy ones, and writes divergence.json.
"""

from __future__ import annotations

import functools
import json
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

Array = np.ndarray

LOSSES = 160  # that are looked at
_BEGINNING = 8  # losses
_SHORT, _LONG = 12, 24  # samples kept: the last, and those that are some steps apart
_LEAST_LOSSES, _LEAST_SAMPLES = 16, 8  # before there is a score
_MOST_ROOM = 130.0  # doublings; float32 has 128
_SMALLEST_LOSS = 1e-12
_NOTED, _LITTLE_ROOM = 0.5, 6.0  # doublings: what a person is told of
_TIMES = {
    "rate: above least": "the learning rate is {:.2g} times what it was",
    "loss: 32 above best": "the loss is {:.2g} times its best",
    "norm: above least": "the norm of the gradients is {:.2g} times its least",
}
UNKNOWN = -1000.0  # what stands for a number that is not measured

_MEASURED = ("update", "norm", "top", "room", "rate")
_FOLLOWED = 3  # of them, whose past is compared; of the others a few numbers do
_OF_LOSSES = (
    "last above usual",
    "4 above usual",
    "8 above best",
    "32 above best",
    "64 above best",
    "16 above usual",
    "last above most",
    "8 above first",
    "8 above worst",
    "4 rise",
    "8 rise",
    "16 rise",
    "32 rise",
    "change",
    "change above usual",
    "most of 8",
    "most of 32",
    "high in 8",
    "high in 32",
)
_OF_SAMPLES = (
    "now above usual",
    "above usual",
    "now above most",
    "above least",
    "rise",
    "above before",
    "shift",
    "above first",
)
FEATURES = (
    *(f"loss: {name}" for name in _OF_LOSSES),
    *(f"{signal}: {name}" for name in _OF_SAMPLES for signal in _MEASURED[:_FOLLOWED]),
    *("update: now", "update: of 5", "room: now", "room: of 5"),
    *("rate: above 3", "rate: above 9", "rate: above most", "rate: above least"),
    "samples: apart",
)


@dataclass(frozen=True)
class Trees:
    """Decision trees whose answers add up. A leaf is a node that both its branches lead back to.

    >>> nodes = [(0, 0.5, 1, 2, 0.0), (0, 0.0, 1, 1, 10.0), (0, 0.0, 2, 2, 20.0)]
    >>> trees = Trees.of([0], nodes, depth=1)
    >>> trees.score(np.array([0.3])), trees.score(np.array([0.7]))
    (10.0, 20.0)
    """

    roots: Array
    feature: Array
    threshold: Array
    left: Array
    right: Array
    value: Array
    depth: int

    @classmethod
    def of(cls, roots: Sequence[int], nodes: Iterable[Sequence[float]], *, depth: int) -> Trees:
        """From the first node of each tree, and (feature, threshold, left, right, value) of all."""
        feature, threshold, left, right, value = zip(*nodes, strict=True)
        places = (np.array(each, dtype=np.intp) for each in (roots, feature, left, right))
        first, which, lower, upper = places
        return cls(first, which, np.array(threshold), lower, upper, np.array(value), depth)

    def score(self, features: Array) -> float:
        at = self.roots
        for _ in range(self.depth):
            goes_left = features[self.feature[at]] <= self.threshold[at]
            at = np.where(goes_left, self.left[at], self.right[at])
        return float(self.value[at].sum())


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The trees, from which score on it is told, and in how many steps the end came then."""

    trees: Trees
    least: float
    low: float
    left: float
    high: float


@functools.cache
def learned() -> Learned:
    """What benchmarks/forecast_fit.py has learned."""
    text = resources.files(__package__).joinpath("divergence.json").read_text(encoding="utf-8")
    read = json.loads(text)
    trees = Trees.of(read["roots"], read["nodes"], depth=read["depth"])
    figures = {key: float(read[key]) for key in ("least", "low", "left", "high")}
    return Learned(trees=trees, **figures)


class Divergence:
    """What the score of one training is made of: `learn` takes a sample and what the losses were.

    All rings are full from the first value on, which stands for what was before.
    """

    def __init__(self) -> None:
        count = len(_MEASURED)
        self._short = np.full((count, _SHORT), np.nan)
        self._long = np.full((count, _LONG), np.nan)
        self._least = np.full((count, 1), math.inf)  # of medians of three in `_long`
        self._first: Array | None = None  # the median of the first four in `_long`
        self._steps: deque[int] = deque(maxlen=5)
        self._kept = self._samples = 0
        self._begin = 0.0  # the median of the first losses
        self._best, self._worst = math.inf, -math.inf
        self._said = np.full(len(FEATURES), UNKNOWN)

    def learn(self, step: int, values: Sequence[float], *, keep: bool) -> None:
        """A sample in doublings, NaN where there is none: update, norm, top, room and rate.

        One to `keep` is some steps after the last such one.
        """
        now = np.array(values)
        is_new = np.isnan(self._short[:, -1])
        now = np.where(np.isnan(now), self._short[:, -1], now)
        self._short[is_new] = self._long[is_new] = now[is_new, None]
        self._short[:, :-1] = self._short[:, 1:]
        self._short[:, -1] = now
        self._steps.append(step)
        self._samples += 1
        if keep:
            if self._kept > 2:
                self._least = np.fmin(self._least, np.sort(self._long[:, -3:], axis=1)[:, 1:2])
            self._long[:, :-1] = self._long[:, 1:]
            self._long[:, -1] = now
            self._kept += 1
            if self._kept == 4:
                self._first = np.sort(self._long[:, -4:], axis=1)[:, 2]

    def features(self, losses: Collection[float]) -> Array | None:
        """What the trees look at; None as long as nobody could know. `losses` has no signs."""
        if self._samples < _LEAST_SAMPLES or len(losses) < _LEAST_LOSSES:
            return None
        sizes = np.fromiter(losses, dtype=float, count=len(losses))[-LOSSES:]
        if not self._begin:
            first = float(np.sort(sizes[:_BEGINNING])[_BEGINNING // 2])
            self._begin = max(first, 64 * _SMALLEST_LOSS)
        found = [*self._of_losses(sizes), *self._of_samples()]
        room = self._short[3, -5:]
        rate, rates = self._short[4, -1], self._long[4]
        found += [self._short[0, -1], np.sort(self._short[0, -5:])[2]]
        found += np.minimum((room[-1], np.sort(room)[2]), _MOST_ROOM).tolist()
        found += [rate - rates[-3], rate - rates[-9], rate - rates.max(), rate - rates.min()]
        found.append(math.log2(max(1, self._steps[-1] - self._steps[0])))
        self._said = np.nan_to_num(np.array(found), copy=False, nan=UNKNOWN)
        return self._said

    def signs(self) -> Iterator[str]:
        """What stands out of what was said last, in sentences."""
        said = dict(zip(FEATURES, self._said.tolist(), strict=True))
        for name, what in _TIMES.items():
            if said[name] >= _NOTED:
                yield what.format(2 ** min(said[name], 99.0))
        if said["update: now"] > UNKNOWN:
            least = said["update: now"] - said["update: above least"]
            now, before = (f"{2.0**each:.2g}" for each in (said["update: now"], least))
            yield f"an update moves the weights by {now} of their size; the least was {before}"
        if 0 <= said["room: now"] < _LITTLE_ROOM:
            yield f"activations have {said['room: now']:.1f} doublings left"

    def _of_losses(self, sizes: Array) -> list[float]:
        """Of the last losses, in doublings; far below the first ones a ratio says little."""
        some = np.log2(np.maximum(sizes, self._begin / 64))
        if len(some) < LOSSES:
            some = np.concatenate((np.full(LOSSES - len(some), some[0]), some))

        def middle(since: int, until: int = 0) -> float:
            part = np.sort(some[LOSSES - since : LOSSES - until])
            return float(part[len(part) // 2])

        last = float(some[-1])
        of_4, of_8, of_16, of_32 = middle(4), middle(8), middle(16), middle(32)
        usual, before = middle(68, 4), middle(80, 16)
        best, worst = min(self._best, of_16), max(self._worst, before)
        changes = np.abs(some[-80:] - some[-81:-1])
        change, change_before = (
            float(np.sort(part)[len(part) // 2]) for part in (changes[-16:], changes[:-16])
        )
        high = some[-32:] > usual + 1
        self._best, self._worst = best, worst
        return [
            last - usual,
            of_4 - usual,
            of_8 - best,
            of_32 - best,
            middle(64) - best,
            of_16 - before,
            last - float(some[-104:-4].max()),
            of_8 - math.log2(self._begin),
            of_8 - worst,
            of_4 - middle(12, 8),
            of_8 - middle(24, 16),
            of_16 - middle(80, 64),
            of_32 - middle(160, 128),
            change,
            change - change_before,
            float(some[-8:].max()) - usual,
            float(some[-32:].max()) - middle(160, 32),
            float(high[-8:].sum()),
            float(high.sum()),
        ]

    def _of_samples(self) -> list[float]:
        """Of each signal: how far above what was usual, the most, the least, the first."""
        short, long = self._short[:_FOLLOWED], self._long[:_FOLLOWED]
        now, recent = short[:, -1], np.sort(short[:, -3:], axis=1)[:, 1]
        usual = np.sort(long[:, -9:-1], axis=1)[:, 4]
        newer, older = np.sort(long[:, -4:], axis=1)[:, 2], np.sort(long[:, :-4], axis=1)[:, 10]
        first = recent if self._first is None else self._first[:_FOLLOWED]
        table = (
            now - usual,
            recent - usual,
            now - long[:, :-1].max(axis=1),
            recent - np.fmin(self._least[:_FOLLOWED, 0], recent),
            now - short[:, -5],
            recent - np.sort(long[:, :4], axis=1)[:, 2],
            newer - older,
            recent - first,
        )
        found: list[float] = np.concatenate(table).tolist()
        return found
