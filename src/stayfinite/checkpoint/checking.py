"""One look through a checkpoint, for those who want to know more than its problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stayfinite.checkpoint.checks.dtypes import name_of
from stayfinite.checkpoint.checks.judging import judge
from stayfinite.checkpoint.comparing import Comparison, compare, tensors_of
from stayfinite.checkpoint.foreign.huggingface import shards_of
from stayfinite.checkpoint.format.held import Held
from stayfinite.checkpoint.format.reading import Reading, nothing_told
from stayfinite.checkpoint.members import gather
from stayfinite.checkpoint.opening import open_checkpoint
from stayfinite.checkpoint.problems import Problem, Rules, errors_in, sorted_problems
from stayfinite.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a checkpoint, such as the optimizer; `largest` is a finite magnitude."""

    name: str
    tensors: int
    bytes: int
    dtypes: tuple[str, ...]
    largest: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """What a checkpoint is, and all that is wrong with it. Unreadable: it has no layout."""

    path: Path
    layout: str | None = None
    step: int | None = None
    parts: tuple[Part, ...] = ()
    problems: tuple[Problem, ...] = ()
    comparison: Comparison | None = None

    @property
    def is_readable(self) -> bool:
        return self.layout is not None

    @property
    def is_good(self) -> bool:
        return self.is_readable and not errors_in(self.problems)


def check(
    path: Path,
    *,
    model: Any = None,
    optimizer: Any = None,
    against: Path | None = None,
    rules: Rules | None = None,
    progress: Callable[[int], None] = nothing_told,
) -> Check:
    """Stream through the file, and through the other one that it is compared with."""
    members = gather(model=model, optimizer=optimizer, scheduler=None, scaler=None, ema=None)
    reading = Reading(digests=against is not None or bool(members.models), progress=progress)
    try:
        contents, damage = open_checkpoint(path, reading)
        other = None if against is None else open_checkpoint(against, reading)[0]
    except CheckpointError as error:
        problem = Problem(kind="unreadable", key="file", message=str(error))
        return Check(path=path, problems=(problem,))
    judged = judge(contents, members, rules or Rules())
    comparison = None if other is None else compare(contents, other)
    found = [*damage, *judged.problems, *(comparison.problems if comparison else ())]
    return Check(
        path=path,
        layout=contents.layout,
        step=contents.step,
        parts=tuple(_part(*each) for each in tensors_of(contents).items()),
        problems=tuple(sorted_problems(found)),
        comparison=comparison,
    )


def _part(name: str, tensors: Mapping[str, Held]) -> Part:
    values = tensors.values()
    return Part(
        name=name,
        tensors=len(tensors),
        bytes=sum(held.nbytes for held in values),
        dtypes=tuple(sorted({name_of(held.dtype) for held in values})),
        largest=max((held.tally.largest for held in values), default=0.0),
    )


def size_on_disk(path: Path) -> int:
    """Bytes that reading the checkpoint will go through; 0 when that cannot be known."""
    try:
        if path.is_dir():
            return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if path.name.endswith(".index.json"):
            return sum(shard.stat().st_size for shard in shards_of(path))
        return path.stat().st_size
    except (OSError, CheckpointError):
        return 0
