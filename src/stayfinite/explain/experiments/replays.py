"""What an experiment asks for, what it gets to see, and who runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from stayfinite.records import NaNType

Precision = Literal["float32", "float64"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """In what a replay differs from the step as it was; by default in nothing."""

    rows: tuple[int, ...] | None = None
    """Only these rows of the batch; one may be there twice."""
    replaced: tuple[int, int] | None = None
    """Of the first row, the values from the one to before the other are those of `donor`."""
    donor: int | None = None
    precision: Precision | None = None
    is_compiled: bool | None = None
    term: int | None = None
    """Only this term of the loss is differentiated."""
    snapshot: int | None = None
    """With the weights of so many snapshots ago, 0 the newest."""
    steps: int = 0
    """So many steps before it are run again, too."""
    learning_rate: float = 1.0
    clip: float | None = None
    """The largest norm that gradients may have in those steps."""
    loss_scale: float = 1.0
    is_guarded: bool = False
    """The operation that went bad first is kept inside its domain, as the fix says."""


AS_IT_WAS = Change()


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a replay showed: finite, or where it went bad first."""

    is_finite: bool
    op: str | None = None
    file: str | None = None
    line: int | None = None
    kind: NaNType = NaNType.NONE

    def is_like(self, other: Seen) -> bool:
        """Whether both went bad at the same place; where none is known, in the same way."""
        if self.is_finite or other.is_finite:
            return False
        if self.op is None and self.line is None and other.op is None and other.line is None:
            return self.kind is other.kind
        return (self.op, self.file, self.line) == (other.op, other.file, other.line)


class CannotReplayError(Exception):
    """A change that this step, or who replays it, does not allow; says why."""


class Replays(Protocol):
    """One bad step that can be run again; every run begins from the same state."""

    @property
    def rows(self) -> int:
        """How many samples the batch has; 0 if it cannot be split."""

    @property
    def values(self) -> int:
        """How many numbers one sample has; 0 if they cannot be replaced."""

    @property
    def snapshots(self) -> int:
        """How many earlier states are kept."""

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms of the loss; empty if it is no sum, or cannot be taken apart."""

    def run(self, change: Change) -> Seen:
        """Run the step with the change; CannotReplayError if that cannot be done.

        Other errors are those of the step itself.
        """
