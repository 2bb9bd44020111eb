"""From a capsule to the smallest script that shows its first bad operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stayfinite.capsule.contents import Birth, Capsule, flat
from stayfinite.capsule.minimal.experiment import Experiment
from stayfinite.capsule.minimal.guessing import first_bad
from stayfinite.capsule.minimal.script import script_of
from stayfinite.capsule.minimal.shrinking import shrunk
from stayfinite.errors import CapsuleError
from stayfinite.records import TensorSummary


@dataclass(frozen=True, kw_only=True, eq=False)
class Repro:
    """The script, and how many numbers its operation was given before and after."""

    text: str
    experiment: Experiment
    numbers_before: int

    @property
    def numbers(self) -> int:
        return self.experiment.size


def minimised(capsule: Capsule) -> Repro:
    """The smallest repro of the capsule's first bad operation, which is run on the way.

    CapsuleError says why there is none: it has no operation, or it does not go bad alone.
    """
    birth = capsule.birth
    if birth is None:
        raise CapsuleError(_no_operation(capsule))
    found = first_bad(birth)
    if found is None:
        hint = "" if _is_whole(birth) else " Make the capsule with the batch in it."
        raise CapsuleError(f"{birth.operation.op} stays finite when it is run alone here.{hint}")
    small = shrunk(found)
    return Repro(
        text=script_of(small, about=_about(capsule, birth, small)),
        experiment=small,
        numbers_before=_numbers(birth),
    )


def _no_operation(capsule: Capsule) -> str:
    origin = capsule.incident.origin
    if origin is None or not origin.exact:
        return "nobody has traced its step; make it anew with `stayfinite run --trace --capsule`."
    where = "" if origin.op else f" The value came in as {origin.phase}."
    return f"it has no operation that could be run alone.{where}"


def _numbers(birth: Birth) -> int:
    """How many the operation was really given."""
    operation = birth.forward or birth.operation
    given = flat(operation.arguments.values())
    return sum(_numel(each) for each in given)


def _numel(value: Any) -> int:
    if isinstance(value, TensorSummary):
        return value.numel
    return value.numel() if isinstance(value, Tensor) else 0


def _is_whole(birth: Birth) -> bool:
    return birth.operation.is_whole and (birth.forward is None or birth.forward.is_whole)


def _about(capsule: Capsule, birth: Birth, small: Experiment) -> list[str]:
    origin = capsule.incident.origin
    where = f" at {origin.file}:{origin.line}" if origin is not None and origin.file else ""
    kind = birth.nan_type.word
    which = "The backward pass of " if small.gradient is not None else ""
    torch = capsule.versions.get("torch", "unknown")
    inputs = (
        "The inputs are the smallest part of the real ones that still shows it."
        if _is_whole(birth)
        else "The numbers are from the statistics of the real inputs, which are not in the capsule."
    )
    return [f"{which}{small.op} gives {kind}; found{where}, with torch {torch}.", inputs]
