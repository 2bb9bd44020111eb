"""What a check of one operation answers, and the words that the checks share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from stayfinite.prevent.preflight.ranges.reach import Reach
from stayfinite.prevent.preflight.ranges.words import words
from stayfinite.prevent.preflight.use import Use
from stayfinite.prevent.risks import Level

Evidence = dict[str, float | int | str]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A risk of one operation, before its place has a name; `of` is what it is claimed once for."""

    level: Level
    cause: str
    what: str
    score: float = 0.0
    evidence: Evidence = field(default_factory=dict)
    fix: str | None = None
    of: object = None


Check = Callable[[Use], Claim | None]

UNLIKELY = 1e-12  # a chance of an empty mask that is no risk, even if samples are not independent
NEAR = 0.1  # a smallest size below so much of the typical one comes near 0

_WORDS = {
    "_softmax": "a softmax",
    "sigmoid": "a sigmoid",
    "exp": "an exponential",
    "sum": "a sum",
    "mean": "a mean",
    "std": "a standard deviation",
    "var": "a variance",
    "sqrt": "a square root",
    "linalg_vector_norm": "a norm",
    "relu": "a ReLU",
    "softplus": "a softplus",
    "sub": "a difference",
    "rsub": "a difference",
    "mul": "a product",
    "div": "a quotient",
    "add": "a sum",
    "abs": "a magnitude",
    "pow": "a power",
    "tanh": "a tanh",
    "data": "data",
    "rand": "uniform noise",
    "parameter": "a parameter",
    "_to_copy": "a cast",
    "mm": "the output of a layer",
    "addmm": "the output of a layer",
    "convolution": "the output of a layer",
    "mse_loss": "a squared error",
    "index": "a selection",
}
_THROUGH = words("clone _to_copy _unsafe_view neg index gather cat stack detach")


def named(reach: Reach) -> str:
    """What somebody would call the value: "a standard deviation"."""
    current = reach
    while current.op in _THROUGH and len(current.made_from) == 1:
        current = current.made_from[0]
    return _WORDS.get(current.op, "a value")


def number(value: float) -> str:
    return f"{value:.3g}"


def is_concerned(use: Use, reach: Reach) -> bool:
    """Whether the value can change, and nobody looks after it before or after the operation."""
    if reach.guarded or not reach.varies:
        return False
    return use.has_gradient or use.phase == "backward" or not use.is_handled


def comes_naturally(reach: Reach) -> bool:
    """Whether 0 is what the value is in quiet data: a spread, a norm, a total, a magnitude."""
    return any(back.op in _NATURAL for back in reach.ancestors(2))


_NATURAL = words(
    "std var linalg_vector_norm norm sum relu abs pow amax mean std_mean var_mean hypot"
)


def is_only_learned(reach: Reach) -> bool:
    """Whether it is made of parameters alone, as a log-temperature is."""
    return not reach.fed or reach.open in ("parameter", "log")


def nearness(margin: float, scale: float) -> float:
    """From 0 (far) to 1 (there)."""
    if not math.isfinite(margin) or scale <= 0:
        return 0.0
    return 1 / (1 + max(0.0, margin) / scale)
