"""An origin and its context, with the questions that rules ask of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stayfinite.explain.history import Context, finite, growth
from stayfinite.records import Confidence, Diagnosis, Origin, TensorSummary

LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.40e38, "float64": 1.79e308}
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
        return (self.origin.node or "").rstrip("0123456789").removesuffix("Backward")

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
        return str(self.fact("expression") or self.origin.code)

    @cached_property
    def losses(self) -> list[float]:
        return finite(step.loss for step in self.context.history)

    @cached_property
    def norms(self) -> list[float]:
        return finite(step.grad_norm for step in self.context.history)

    @cached_property
    def loss_growth(self) -> float:
        return growth(self.losses)

    @cached_property
    def norm_growth(self) -> float:
        return growth(self.norms)

    @property
    def is_diverging(self) -> bool:
        """Whether training was running away before the value overflowed."""
        growths = (self.loss_growth / 20, self.norm_growth / 100, self.context.weight_growth / 50)
        return max(growths) > 1

    @cached_property
    def typical_input(self) -> float:
        """The usual largest magnitude of the largest input of the top-level modules."""
        return max(
            (
                statistics.median(known)
                for values in self.context.input_ranges.values()
                if (known := finite(values))
            ),
            default=0.0,
        )

    @cached_property
    def outlier(self) -> tuple[str, float, float] | None:
        """(input, its magnitude now, its usual one) when the last batch stands out."""
        for path, values in self.context.input_ranges.items():
            before = finite(values[:-1])
            usual = statistics.median(before) if len(before) > 1 else 0.0
            if usual > 0 and values[-1] > 30 * usual and values[-1] > 100:
                return path, values[-1], usual
        return None


def bare_name(op: str) -> str:
    """ "log" of "aten.log_.default"."""
    parts = op.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    return name.removeprefix("_foreach_").rstrip("_").lstrip("_")


def largest(summary: TensorSummary) -> float:
    """The largest finite magnitude."""
    return max(abs(summary.min or 0.0), abs(summary.max or 0.0))


def diagnosis(
    cause: str,
    why: str,
    fix: str,
    *,
    sure: Confidence = "likely",
    evidence: tuple[str, ...] = (),
) -> Diagnosis:
    """A Diagnosis, written the way rules write it."""
    return Diagnosis(cause=cause, why=why, fix=fix, confidence=sure, evidence=evidence)


def number(value: float | None) -> str:
    """The number as a person would write it."""
    return "none" if value is None else f"{value:.4g}"
