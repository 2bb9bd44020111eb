"""What a check claims, and the risk that it becomes: with its line and module, each said once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from stayfinite.causes import CAUSES
from stayfinite.living import Names
from stayfinite.locate.provenance import Site
from stayfinite.locate.source import Place, resolve
from stayfinite.prevent.preflight.bounds import Reach, words
from stayfinite.prevent.preflight.range_tracer import Use
from stayfinite.prevent.risks import Level, Risk
from stayfinite.records import Origin

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


def figure(value: float) -> str:
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


_NOWHERE = "the first step"


class Scene:
    """Where things are: names of modules and lines, looked up once."""

    def __init__(self, folder: str | None, *, outside: Place | None = None) -> None:
        self.folder = folder
        self._outside = outside
        self._names: Names | None = None

    @property
    def names(self) -> Names:
        if self._names is None:
            self._names = Names()
        return self._names

    def module(self, site: Site) -> str:
        """The dotted name of the innermost module, "" outside any."""
        if not site.modules:
            return ""
        root, name = self.names.module(site.modules[-1], site.modules)
        return name or root

    def line(self, site: Site) -> str:
        """file:line, or the module where no line of the user's is nearer."""
        if site.place is None or self._is_outside(site.place):
            return self.module(site) or _NOWHERE
        span = resolve(site.place, folder=self.folder)
        return f"{span.file}:{span.line}"

    def _is_outside(self, place: Place) -> bool:
        return self._outside is not None and place.code is self._outside.code

    def code(self, site: Site) -> str:
        if site.place is None or self._is_outside(site.place):
            return ""
        return resolve(site.place, folder=self.folder).code

    def line_of(self, origin: Origin) -> str:
        """The same of a place that the tracer found."""
        if origin.file is None or origin.line is None:
            return origin.module or origin.root or _NOWHERE
        if self._outside is not None:
            outside = resolve(self._outside, folder=self.folder)
            if (origin.file, origin.function) == (outside.file, outside.function):
                return origin.module or origin.root or _NOWHERE
        return f"{origin.file}:{origin.line}"

    def risk(self, site: Site, claim: Claim) -> Risk:
        """The claim with its place."""
        module, code = self.module(site), self.code(site)
        evidence = dict(claim.evidence)
        if module:
            evidence["module"] = module
        if code:
            evidence["code"] = code
        return Risk(
            level=claim.level,
            what=claim.what,
            where=self.line(site),
            fix=claim.fix or CAUSES[claim.cause].fix,
            cause=claim.cause,
            evidence=evidence,
            score=claim.score,
        )
