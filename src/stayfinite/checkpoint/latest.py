"""latest_good: which checkpoint to go on from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stayfinite.checkpoint.checks.judging import judge
from stayfinite.checkpoint.files import is_temporary
from stayfinite.checkpoint.foreign.dcp import is_dcp_folder
from stayfinite.checkpoint.foreign.huggingface import folder_files, shards_of
from stayfinite.checkpoint.format.own import tree_of
from stayfinite.checkpoint.format.reading import Reading, header_of
from stayfinite.checkpoint.generations import generations
from stayfinite.checkpoint.members import gather
from stayfinite.checkpoint.opening import open_checkpoint
from stayfinite.checkpoint.problems import Rules, errors_in
from stayfinite.errors import CheckpointError

_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".index.json")


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
    candidates = _candidates(place) if place.is_dir() else generations(place)
    members = gather(model=model, optimizer=None, scheduler=None, scaler=None, ema=None)
    rules = Rules(ignore=ignore, nonfinite_ok=nonfinite_ok)
    for path in sorted(candidates, key=_age, reverse=True):
        try:
            contents, damage = open_checkpoint(path, Reading())
        except CheckpointError:
            continue
        judged = judge(contents, members, rules)
        if contents.models and not errors_in([*damage, *judged.problems]):
            return path
    return None


def _candidates(folder: Path) -> Iterator[Path]:
    paths = [path for path in folder.iterdir() if not is_temporary(path)]
    parts = {
        shard for path in paths if path.name.endswith(".index.json") for shard in _shards(path)
    }
    for path in paths:
        if path.is_dir():
            if is_dcp_folder(path) or "model" in folder_files(path):
                yield path
        elif path not in parts and (path.name.endswith(_ENDINGS) or _is_ours(path)):
            yield path


def _shards(index: Path) -> list[Path]:
    try:
        return list(shards_of(index))
    except (CheckpointError, OSError):
        return []


def _is_ours(path: Path) -> bool:
    try:
        return header_of(path)[1]
    except CheckpointError:
        return False


def _age(path: Path) -> tuple[float, bool]:
    """When it was saved; of two with one time the newer generation counts more."""
    try:
        header, is_ours = header_of(path) if path.is_file() else (None, False)
        saved_at = tree_of(header.metadata)["saved_at"] if header and is_ours else None
    except (CheckpointError, KeyError, TypeError):
        saved_at = None
    time = saved_at if isinstance(saved_at, (int, float)) else path.stat().st_mtime
    return time, not path.suffix[1:].isdigit()
