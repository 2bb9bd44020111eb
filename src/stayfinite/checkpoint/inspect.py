"""Looks through checkpoints: one, two side by side, latest_good, first_bad_checkpoint."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stayfinite.checkpoint.checks import is_narrower, judge, name_of
from stayfinite.checkpoint.folder import age, checkpoints_in, generations, is_checkpoint_folder
from stayfinite.checkpoint.foreign import is_torch_file, read_torch, shards_of
from stayfinite.checkpoint.load import examine, open_checkpoint
from stayfinite.checkpoint.modules import Members, gather
from stayfinite.checkpoint.problem import Problem, Rules, error, errors_in, sorted_problems, warning
from stayfinite.checkpoint.stream import Reading, nothing_told
from stayfinite.checkpoint.values import (
    Contents,
    Held,
    OptimizerRecord,
    hold_all,
    is_same,
    leaves,
    named_leaves,
    named_parts,
)
from stayfinite.errors import CheckpointError, InputError


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
    comparison: CheckpointComparison | None = None

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
    progress: Callable[[int], None] = nothing_told,
) -> Check:
    """Stream through the file, and through the other one that it is compared with."""
    members = gather(model=model, optimizer=optimizer)
    reading = Reading(digests=against is not None or bool(members.models), progress=progress)
    contents, problems = examine(path, reading, members, Rules())
    if contents is None:
        return Check(path=path, problems=tuple(problems))
    comparison = None
    if against is not None:
        try:
            comparison = compare(contents, open_checkpoint(against, reading)[0])
        except CheckpointError as failure:
            return Check(path=path, problems=(error("unreadable", "file", str(failure)),))
        problems += comparison.problems
    parts = [
        Part(
            name=name,
            tensors=len(tensors),
            bytes=sum(held.nbytes for held in tensors.values()),
            dtypes=tuple(sorted({name_of(held.dtype) for held in tensors.values()})),
            largest=max((held.tally.largest for held in tensors.values()), default=0.0),
        )
        for name, tensors in _tensors_by_part(contents).items()
    ]
    return Check(
        path=path,
        layout=contents.layout,
        step=contents.step,
        parts=tuple(parts),
        problems=tuple(sorted_problems(problems)),
        comparison=comparison,
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


GROWTH = 100.0
"""So many times the largest magnitude of before is worth a warning."""


@dataclass(frozen=True, kw_only=True)
class CheckpointComparison:
    """How many tensors are the same to the byte, which are not, and what is wrong with that."""

    same: int
    changed: tuple[str, ...]
    problems: tuple[Problem, ...]


def compare(contents: Contents, other: Contents) -> CheckpointComparison:
    """The first against the second, tensor by tensor; they must have been read with digests."""
    ours, theirs = _tensors_to_compare(contents), _tensors_to_compare(other)
    both = [key for key in ours if key in theirs]
    changed = tuple(key for key in both if not is_same(ours[key], theirs[key]))
    problems = [
        *(error("missing", k, "is only in the other one.") for k in theirs if k not in ours),
        *(error("unexpected", k, "is not in the other one.") for k in ours if k not in theirs),
    ]
    for key in both:
        problems += _differences(key, ours[key], theirs[key])
    return CheckpointComparison(
        same=len(both) - len(changed), changed=changed, problems=tuple(problems)
    )


def _tensors_to_compare(contents: Contents) -> dict[str, Held]:
    """The tensors of models, averages and optimizers by their full names."""
    return {
        f"{part}.{name}": held
        for part, tensors in _tensors_by_part(contents).items()
        if part.partition(".")[0] in ("model", "ema", "optimizer")
        for name, held in tensors.items()
    }


def _tensors_by_part(contents: Contents) -> dict[str, dict[str, Held]]:
    """The tensors of each part that is there, by their names in it."""
    parts: dict[str, Any] = {}
    for part in ("model", "ema", "optimizer", "scheduler", "scaler"):
        for name, tree in named_parts(part, contents.parts[part]):
            parts[name] = tree.state_dict if isinstance(tree, OptimizerRecord) else tree
    parts |= {"random": contents.random, "extra": contents.extra}
    return {part: dict(named_leaves(tree)) for part, tree in parts.items() if tree}


def _differences(key: str, held: Held, other: Held) -> Iterator[Problem]:
    if held.shape != other.shape:
        message = f"has shape {list(held.shape)}, and {list(other.shape)} in the other one."
        yield error("shape", key, message)
    if held.dtype != other.dtype:
        message = f"is {name_of(held.dtype)}, and {name_of(other.dtype)} in the other one."
        yield (error if is_narrower(held.dtype, other.dtype) else warning)("dtype", key, message)
    before, now = other.tally.largest, held.tally.largest
    if before > 0 and now > GROWTH * before and now > 1:
        message = f"its largest magnitude went from {before:.3g} to {now:.3g}."
        yield warning("drift", key, message)


def latest_good(
    directory: str | os.PathLike[str],
    *,
    model: Any = None,
    ignore: Sequence[str] = (),
    nonfinite_ok: Sequence[str] = (),
) -> Path | None:
    """The newest checkpoint in the folder that has no error, or None when there is none.

    Given the path of a checkpoint, its generations are looked at instead. With a model it must
    fit that model too. They are read one after another from the newest until one is good.

    >>> import tempfile, torch
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, value in (("a.pt", 1.0), ("b.pt", float("nan"))):
    ...     torch.save({"weight": torch.tensor([value])}, folder / name)
    >>> latest_good(folder).name
    'a.pt'
    """
    place = Path(directory)
    is_folder = place.is_dir() and not is_checkpoint_folder(place)
    candidates = checkpoints_in(place) if is_folder else generations(place)
    members = gather(model=model)
    rules = Rules(ignore=ignore, nonfinite_ok=nonfinite_ok)
    for path in sorted(candidates, key=age, reverse=True):
        contents, problems = examine(path, Reading(), members, rules)
        if contents is not None and contents.models and not errors_in(problems):
            return path
    return None


AnyPath = str | os.PathLike[str]


def first_bad_checkpoint(
    checkpoints: AnyPath | Sequence[AnyPath], is_bad: Callable[[Path], bool] | None = None
) -> Path | None:
    """The first bad one of a series of checkpoints, by bisection; None when the last is good.

    Give a folder (its checkpoints are taken by the time of saving) or the paths, oldest first;
    files of `save_checkpoint` and of others, as `stayfinite check` reads them. A bad one stays
    bad in the checkpoints after it, so about log2(n) files are read. `is_bad(path)` may replace
    the default: a value in it that no training can go on from, such as a weight that is not
    finite. Nothing is unpickled.

    >>> import tempfile, torch
    >>> files = [Path(tempfile.mkdtemp()) / f"{step}.pt" for step in range(4)]
    >>> for step, file in enumerate(files):
    ...     torch.save({"weight": torch.tensor(1.0 if step < 2 else float("nan"))}, file)
    >>> first_bad_checkpoint(files).name
    '2.pt'
    """
    if not isinstance(checkpoints, (str, os.PathLike)):
        paths = [Path(path) for path in checkpoints]
    elif (folder := Path(checkpoints)).is_dir():
        paths = checkpoints_in(folder)
    else:
        raise InputError(
            f"{folder} is not a folder; give a folder of checkpoints or a list of files."
        )
    judged = is_bad if is_bad is not None else has_bad_value
    if not paths or not judged(paths[-1]):
        return None
    return paths[bisect_left(range(len(paths) - 1), True, key=lambda at: bool(judged(paths[at])))]


def has_bad_value(path: Path) -> bool:
    """Whether it holds a value that no training can go on from; InputError if it is unreadable."""
    try:
        contents, _ = open_checkpoint(path, Reading())
    except CheckpointError as refused:
        try:  # a file of torch in which no model can be told: is any tensor bad?
            if not path.is_file() or not is_torch_file(path):
                raise refused
            tree, _ = read_torch(path, Reading())
        except (CheckpointError, OSError) as failure:
            raise InputError(str(refused)) from failure
        return not all(held.tally.is_finite for held in leaves(hold_all(tree, "file")))
    return bool(errors_in(judge(contents, Members(), Rules()).problems))
