"""first_bad_checkpoint: since when a series of checkpoints is bad."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from stayfinite.checkpoint.checks.judging import judge
from stayfinite.checkpoint.folders import checkpoints_in
from stayfinite.checkpoint.foreign.torch_files import is_torch_file, read_torch
from stayfinite.checkpoint.format.held import hold_all, leaves
from stayfinite.checkpoint.format.reading import Reading
from stayfinite.checkpoint.members import Members
from stayfinite.checkpoint.opening import open_checkpoint
from stayfinite.checkpoint.problems import Rules, errors_in
from stayfinite.errors import CheckpointError, InputError

AnyPath = str | os.PathLike[str]


def first_bad_checkpoint(
    checkpoints: AnyPath | Sequence[AnyPath],
    is_bad: Callable[[Path], bool] | None = None,
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
    paths = _series(checkpoints)
    judged = is_bad if is_bad is not None else has_bad_value
    if not paths or not judged(paths[-1]):
        return None
    low, high = 0, len(paths) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if judged(paths[middle]) else (middle + 1, high)
    return paths[low]


def _series(checkpoints: AnyPath | Sequence[AnyPath]) -> list[Path]:
    if not isinstance(checkpoints, (str, os.PathLike)):
        return [Path(path) for path in checkpoints]
    folder = Path(checkpoints)
    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder; give a folder of checkpoints or a list of files."
        )
    return checkpoints_in(folder)


def has_bad_value(path: Path) -> bool:
    """Whether it holds a value that no training can go on from; InputError if it is unreadable."""
    try:
        contents, _ = open_checkpoint(path, Reading())
    except CheckpointError as error:
        return _has_bad_tensor(path, error)
    return bool(errors_in(judge(contents, Members(), Rules()).problems))


def _has_bad_tensor(path: Path, refused: CheckpointError) -> bool:
    """The same of a file of torch in which no model can be told: whether any tensor is bad."""
    try:
        if not path.is_file() or not is_torch_file(path):
            raise refused
        tree, _ = read_torch(path, Reading())
    except (CheckpointError, OSError) as error:
        raise InputError(str(refused)) from error
    return not all(held.tally.is_finite for held in leaves(hold_all(tree, "file")))
