"""What a capsule holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from stayfinite.records import Incident, NaNType, TensorSummary

FORMAT = 1
Kind = Literal["script", "step"]


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One of the user's own files. `root` 0 is the project; others were found by the path."""

    name: str
    text: bytes
    root: int = 0


@dataclass(frozen=True, kw_only=True)
class CodeReference:
    """Which code ran. `digests` has the SHA-256 of each own file, even where its text is missing.

    A capsule of kind "script" is replayed by running `command`, the words that follow `python`; in
    one of kind "step" it is run up to its first `guard.step`, which gets the state and the batch
    of the capsule. `folder` is the one that files in the incident are relative to, and `paths`
    are folders on the path, both within the project.
    """

    kind: Kind
    command: tuple[str, ...] = ()
    folder: str = "."
    paths: tuple[str, ...] = ()
    function: str | None = None
    commit: str | None = None
    is_dirty: bool = False
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """A call of an operator, by the schema's names; in place of a tensor may be its summary."""

    op: str
    arguments: Mapping[str, Any]

    @property
    def is_whole(self) -> bool:
        """Whether all of its tensors are there."""
        return not any(isinstance(value, TensorSummary) for value in flat(self.arguments.values()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Birth:
    """The operation that gave the first bad value.

    In a backward pass `forward` is the operation whose gradient it is part of, where that is
    known.
    """

    operation: Operation
    nan_type: NaNType
    forward: Operation | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """Models and optimizers before the step; without `tensors` only their digests.

    `tree` is as checkpoints have it.
    """

    tree: Any
    digests: dict[str, str]
    tensors: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Capsule:
    """A bad step, with what it takes to run it again.

    `batch` is a tuple of what the step was given, empty without consent. `random` are the
    generator states as the step began, `seeds` those as each process of the script began.
    `notes` say what was left out.
    """

    incident: Incident
    code: CodeReference
    sources: tuple[SourceFile, ...] = ()
    birth: Birth | None = None
    state: State | None = None
    batch: tuple[Any, ...] = ()
    random: Mapping[str, Any] | None = None
    seeds: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    made: float = 0.0


def flat(values: Any) -> list[Any]:
    """The arguments, with lists opened."""
    found: list[Any] = []
    for value in values:
        found += flat(value) if isinstance(value, (list, tuple)) else [value]
    return found
