"""What can be wrong with a checkpoint, and what of that a caller lets pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from stayfinite.errors import CheckpointError

Kind = Literal[
    "unreadable",
    "damaged",
    "missing",
    "unexpected",
    "shape",
    "dtype",
    "narrowed",
    "nonfinite",
    "variance",
    "learning_rate",
    "optimizer",
    "scaler",
    "leftover",
    "tied",
    "forward",
    "not_loaded",
    "drift",
]

_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, and where; what is no error is a warning.

    >>> print(Problem(kind="nonfinite", key="model.weight", message="holds NaN."))
    model.weight: holds NaN.
    """

    kind: Kind
    key: str
    message: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


def error(kind: Kind, key: str, message: str) -> Problem:
    return Problem(kind=kind, key=key, message=message)


def warning(kind: Kind, key: str, message: str) -> Problem:
    return Problem(kind=kind, key=key, message=message, is_error=False)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How strict a check is; the sequences are patterns of tensor names."""

    strict: bool = True
    ignore: Sequence[str] = ()
    nonfinite_ok: Sequence[str] = ()

    @property
    def misfit(self) -> Callable[[Kind, str, str], Problem]:
        """Makes the problem of what only one side has: an error, or a warning if not strict."""
        return error if self.strict else warning


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is meant by any pattern, such as "*.last_attention"."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def errors_in(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.is_error]


def sorted_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Errors before warnings, else as they were found; each once."""
    return sorted(dict.fromkeys(problems), key=lambda problem: not problem.is_error)


def refusal(what: str, problems: Sequence[Problem]) -> CheckpointError:
    """The error that tells all of them."""
    errors = errors_in(problems)
    lines = [f"\n- {problem}" for problem in errors[:_SHOWN]]
    if len(errors) > _SHOWN:
        lines.append(f"\n- and {len(errors) - _SHOWN} more, in `problems` of this error")
    return CheckpointError(f"{what}:{''.join(lines)}", problems=problems)
