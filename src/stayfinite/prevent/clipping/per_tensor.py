"""Each tensor by itself, against a moving average of its own norm."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stayfinite.clip.memory import Drop, drop_bad, scale_each
from stayfinite.clip.norms import Norm, joint, quick_norms, true_norm
from stayfinite.clip.result import ClipResult, left_alone, result_of
from stayfinite.clip.targets import Gradient
from stayfinite.detect.known import note_finite
from stayfinite.errors import ConfigError
from stayfinite.prevent.clipping import options

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
        options.positive(self, "factor")
        options.between(self, "decay", 0, 1)
        options.whole(self, "warmup")
        options.positive(self, "max_norm", finite=False)
        options.whole(self, "window")
        options.positive(self, "most")

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
