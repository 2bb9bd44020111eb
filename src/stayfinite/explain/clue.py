"""What rules ask: an origin with its context, the last steps, and the user's own expression."""

from __future__ import annotations

import ast
import math
import statistics
import string
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from stayfinite.records import Confidence, Diagnosis, Origin, TensorSummary
from stayfinite.syntax import callee, in_brackets, is_operation, operand
from stayfinite.text import bare_name, count, node_name

LARGEST = {
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep+127"),
    "float32": float.fromhex("0x1.fffffep+127"),
    "float64": sys.float_info.max,
}
SMALLEST = {"float16": 6e-8, "bfloat16": 9.2e-41, "float32": 1.4e-45, "float64": 4.9e-324}


@dataclass(frozen=True)
class Clue:
    """What the rules look at."""

    origin: Origin
    context: Context

    @cached_property
    def op(self) -> str:
        """The operator's bare name, without namespace, overload and in-place mark: "log"."""
        return bare_name(self.origin.op or "")

    @cached_property
    def node(self) -> str:
        """The autograd node without "Backward0"; empty outside a backward pass."""
        return node_name(self.origin.node)

    def is_derivative_of(self, names: Collection[str]) -> bool:
        """Whether it is the derivative of one of these operations that went wrong."""
        return self.is_backward and self.node.lower() in names

    @property
    def is_backward(self) -> bool:
        return self.origin.phase == "backward"

    def fact(self, name: str, default: Any = None) -> Any:
        return self.origin.facts.get(name, default)

    def input(self, name: str) -> TensorSummary | None:
        return next((item for item in self.origin.inputs if item.name == name), None)

    @property
    def first(self) -> TensorSummary | None:
        return self.origin.inputs[0] if self.origin.inputs else None

    @property
    def output(self) -> TensorSummary | None:
        return self.origin.outputs[0] if self.origin.outputs else None

    @property
    def dtype(self) -> str:
        return self.output.dtype if self.output else ""

    @cached_property
    def size(self) -> float:
        """The largest finite magnitude of all inputs."""
        return max(map(largest, self.origin.inputs), default=0.0)

    @property
    def has_zero(self) -> bool:
        return any(item.zero_count for item in self.origin.inputs)

    @property
    def optimizer(self) -> OptimizerFacts:
        return self.context.optimizer or OptimizerFacts()

    @property
    def scalars(self) -> dict[str, Any]:
        return dict(self.fact("scalars", {}))

    def made_by(self, name: str) -> list[str]:
        """The operation that made an input, then those that made its inputs; may be empty."""
        return list(self.fact("made_by", {}).get(name, []))

    @property
    def inside(self) -> str:
        """ "distributions/normal.py:log_prob" when torch's own Python code ran the operation."""
        return str(self.fact("inside") or "")

    @property
    def expression(self) -> str:
        """What ran the operation, as it is written; in a package where the user's line calls one.

        Empty where the source is not known.
        """
        place = self.fact("library") or {**self.origin.facts, "code": self.origin.code}
        return str(place.get("expression") or place["code"])

    @cached_property
    def inner(self) -> str:
        """What the call in the expression works on, as a name to write in a fix."""
        return argument(self.expression) or "x"

    @cached_property
    def losses(self) -> list[float]:
        return finite(step.loss for step in self.context.history)

    @cached_property
    def norms(self) -> list[float]:
        return finite(step.grad_norm for step in self.context.history)

    @property
    def is_diverging(self) -> bool:
        """Whether training was running away before the value overflowed."""
        by_steps = (growth(self.losses) / 20, growth(self.norms) / 100)
        return max(*by_steps, self.context.weight_growth / 50) > 1

    @property
    def trend(self) -> str:
        """How the training went before, in words."""
        parts = [
            f"{what} from {number(values[0])} to {number(values[-1])}"
            for what, values in (("loss", self.losses), ("gradient norm", self.norms))
            if len(values) > 1
        ]
        if self.context.weight_growth > 50:
            parts.insert(0, f"a weight grew {number(self.context.weight_growth)} times as large")
        return ", ".join(parts) or count(len(self.context.history), "step")

    @cached_property
    def raised_rate(self) -> tuple[StepFacts, StepFacts] | None:
        """The steps before and after the last jump to a rate that was never so high.

        Not the jumps of a warm-up, and none after which the loss stayed as it was.
        """
        steps = [step for step in self.context.history if (step.learning_rate or 0) > 0]
        for at in range(len(steps) - 1, _WARM, -1):
            before, after = steps[at - 1], steps[at]
            highest = max(step.learning_rate or 0 for step in steps[:at])
            if (after.learning_rate or 0) < _JUMP * highest:
                continue
            usual = finite(abs(s.loss) for s in steps[at - _WARM : at] if s.loss is not None)
            since = finite(abs(s.loss) for s in steps[at:] if s.loss is not None)
            is_worse = bool(usual and since) and max(since) > 10 * statistics.median(usual)
            return (before, after) if is_worse else None
        return None

    @cached_property
    def typical_input(self) -> float:
        """The usual largest magnitude of the largest input of the top-level modules."""
        known = map(finite, self.context.input_ranges.values())
        return max((statistics.median(values) for values in known if values), default=0.0)

    @cached_property
    def outlier(self) -> tuple[str, float, float] | None:
        """(input, its magnitude now, its usual one) when the last batch stands out."""
        for path, values in self.context.input_ranges.items():
            before = finite(values[:-1])
            usual = statistics.median(before) if len(before) > 1 else 0.0
            if usual > 0 and values[-1] > 30 * usual and values[-1] > 100:
                return path, values[-1], usual
        return None


Rule = Callable[[Clue], Diagnosis | None]


def largest(summary: TensorSummary) -> float:
    """The largest finite magnitude."""
    return max(abs(summary.min or 0.0), abs(summary.max or 0.0))


def diagnosis(
    cause: str, why: str, fix: str, *, sure: Confidence = "likely", evidence: tuple[str, ...] = ()
) -> Diagnosis:
    """A Diagnosis, written the way rules write it."""
    return Diagnosis(cause=cause, why=why, fix=fix, confidence=sure, evidence=evidence)


def rule(
    when: Callable[[Clue], bool], cause: str, why: str, fix: str, *, sure: Confidence = "likely"
) -> Rule:
    """A rule whose texts are fixed but for what they name of the clue: "{clue.expression}"."""

    def answer(clue: Clue) -> Diagnosis | None:
        if not when(clue):
            return None
        texts = (_TEMPLATES.format(text, clue=clue) for text in (why, fix))
        return diagnosis(cause, *texts, sure=sure)

    return answer


class _Templates(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        is_number = value is None or isinstance(value, float)
        return number(value) if is_number else str(format(value, format_spec))


_TEMPLATES = _Templates()


def number(value: float | None) -> str:
    """The number as a person would write it."""
    return "none" if value is None else f"{value:.4g}"


_KEEP = 128
_JUMP = 3.0
_WARM = 10  # steps that the rate was lower
_NUMBERS = ("loss", "grad_norm", "learning_rate", "scale")
Ranges = dict[str, tuple[float, float]]  # largest magnitude and standard deviation


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One update that was attempted; numbers may be NaN, None is not known."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    scale: float | None = None
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """What the rules need to know of an optimizer."""

    kind: str = ""
    learning_rate: float | None = None
    base_rate: float | None = None  # what a scheduler began with, unless it was told to rise
    eps: float | None = None
    line_search: str | None = None
    impossible_moments: ImpossibleMoments | None = None


@dataclass(frozen=True, kw_only=True)
class ImpossibleMoments:
    """A parameter whose state of Adam no sequence of gradients leaves behind."""

    name: str
    count: int
    numel: int
    ratio: float  # the largest first moment over the root of its second, with eps
    limit: float  # what gradients reach
    updates: int  # that it counts
    seen: int  # of them


@dataclass(frozen=True, kw_only=True)
class Context:
    """All that is known besides the origin."""

    step: int = 0
    history: tuple[StepFacts, ...] = ()
    optimizer: OptimizerFacts | None = None
    scaler_skips: int = 0
    uses_scaler: bool = False
    scale: float | None = None
    input_ranges: dict[str, tuple[float, ...]] = field(default_factory=dict)
    initial_weights: dict[str, tuple[float, float]] = field(default_factory=dict)
    weight_growth: float = 1.0
    poisoned_buffers: tuple[str, ...] = ()
    loaded_keys: tuple[str, ...] = ()
    bad_at_start: tuple[str, ...] = ()  # parameters and buffers, before the first update
    loads_at: str = ""  # the line of the script that loads a state, if it has one
    bootstraps: bool = False
    is_adversarial: bool = False
    is_undone: bool = False  # the bad step, with all that it has changed

    @property
    def was_updated(self) -> bool:
        """Whether weights may have changed: no learning rate explains what comes before that.

        A step with a learning rate is an optimizer's. Without one, the history is of backward
        passes, and only from the second on may weights have been changed by hand before it.
        """
        applied = [step for step in self.history if not step.skipped]
        if not self.history:  # as with torch.func, whose passes have no loss that is known
            return self.step > 1
        return len(applied) > 1 or any(step.learning_rate is not None for step in applied)


class History:
    """A ring of the last steps. Values may be device tensors; they are read only when asked for."""

    def __init__(self) -> None:
        self._ring: deque[dict[str, Any]] = deque(maxlen=_KEEP)
        self._first: list[dict[str, Any]] = []

    def add(self, **facts: Any) -> None:
        self._ring.append(facts)
        if len(self._first) < 8:
            self._first.append(facts)

    def steps(self) -> tuple[StepFacts, ...]:
        """Oldest first; the run's first few steps are always among them."""
        recent = list(self._ring)
        early = [facts for facts in self._first if facts["step"] < recent[0]["step"]]
        return tuple(
            StepFacts(
                step=facts["step"],
                skipped=bool(facts.get("skipped")),
                **{name: float(facts[name]) for name in _NUMBERS if facts.get(name) is not None},
            )
            for facts in [*early, *recent]
        )


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that are known and finite."""
    return [value for value in values if value is not None and math.isfinite(value)]


def growth(values: list[float]) -> float:
    """How many times larger the last values got than the typical early one; 1 if unknown.

    Magnitudes are compared, so that a log-likelihood that falls without end counts too.
    """
    sizes = [abs(value) for value in values]
    if len(sizes) < 2:
        return 1.0
    late = max(sizes[-3:]) if len(sizes) > 4 else sizes[-1]
    early = statistics.median(sizes[:-3][:16]) if len(sizes) > 4 else sizes[0]
    return late / early if early > 0 else 1.0


def weight_growth(before: Ranges, now: Ranges) -> float:
    """How many times larger the fastest-growing weight is than at the start."""
    grown = [now[name][0] / max(size, 1e-2) for name, (size, _) in before.items() if name in now]
    return max((g for g in grown if math.isfinite(g)), default=1.0)


_LIBRARIES = ("torch", "F", "nn", "functional", "np", "math")


def argument(expression: str | None, name: str = "", *, is_last: bool = False) -> str | None:
    """What the call works on: x of `torch.log(x)` and of `x.log()`; None if it is no call.

    With a name, only a call of that function counts, wherever it stands in the expression.
    `is_last` asks for its last argument instead.
    """
    for node in _nodes(expression):
        if isinstance(node, ast.Call) and name in ("", callee(node)):
            inner = operand(node, _LIBRARIES)
            if is_last and node.args:
                inner = node.args[-1]
            if inner is not None:
                return _text(inner)
    return None


def operands(expression: str | None, operator: type[ast.operator]) -> tuple[str, str] | None:
    """Left and right of the outermost such operator."""
    for node in _nodes(expression):
        if is_operation(node, operator):
            return ast.unparse(node.left), _text(node.right)
    return None


def _nodes(expression: str | None) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse((expression or "").strip(), mode="eval")))
    except (SyntaxError, ValueError):
        return []


def _text(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if isinstance(node, ast.Constant) else in_brackets(node, text)
