"""Every exception, each with its report or its remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stayfinite.records import Incident, NaNReport


class StayFiniteError(Exception):
    """Base of all errors that stayfinite raises on purpose."""


class ConfigError(StayFiniteError, ValueError):
    """An option has a value that it cannot have; the message says which values it can."""


class InputError(StayFiniteError, TypeError):
    """Something was passed that is not what the call accepts."""


class PackageError(StayFiniteError, ImportError):
    """An optional package is missing or too old; the message has the command to install it."""


class RecordError(StayFiniteError, ValueError):
    """A saved record cannot be read."""


class PatchError(StayFiniteError, ValueError):
    """A diff cannot be applied to a file exactly as it is; nothing was changed."""


class NonFiniteError(StayFiniteError, ArithmeticError):
    """A value that must be finite is not; `report` says what, `incident` where it began."""

    def __init__(
        self, message: str, *, report: NaNReport | None = None, incident: Incident | None = None
    ) -> None:
        super().__init__(message)
        self.report = report
        self.incident = incident


class SnapshotError(StayFiniteError, RuntimeError):
    """Training state cannot be put back exactly; the message names what is in the way."""


class TrainingAbortedError(StayFiniteError, RuntimeError):
    """Training was stopped on purpose, before the weights were touched; `incident` says why."""

    def __init__(self, message: str, *, incident: Incident | None = None) -> None:
        super().__init__(message)
        self.incident = incident


class TrainingSetupError(StayFiniteError, ValueError):
    """Training cannot begin like this; `problems` has everything that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        said = "".join(f"\n- {problem}" for problem in self.problems)
        super().__init__(f"training cannot begin:{said}")


class CheckpointError(StayFiniteError, ValueError):
    """A checkpoint cannot be used; nothing was changed. `problems` has everything it found."""

    def __init__(self, message: str, *, problems: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class CapsuleError(StayFiniteError, ValueError):
    """A capsule cannot be made, read or replayed; nothing of it was run, nothing was changed."""
