"""The checkpoints of a folder, and when each was saved."""

from __future__ import annotations

from pathlib import Path

from stayfinite.checkpoint.files import is_temporary
from stayfinite.checkpoint.foreign.huggingface import folder_files, shards_of
from stayfinite.checkpoint.format.own import tree_of
from stayfinite.checkpoint.format.reading import header_of
from stayfinite.errors import CheckpointError

_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".index.json")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in the folder, oldest first; not those in folders that are none."""
    paths = [path for path in folder.iterdir() if not is_temporary(path)]
    parts = {
        shard for path in paths if path.name.endswith(".index.json") for shard in _shards(path)
    }
    found = [path for path in paths if path not in parts and _is_checkpoint(path)]
    return sorted(found, key=age)


def is_checkpoint_folder(path: Path) -> bool:
    """Whether the folder is itself one checkpoint."""
    return path.is_dir() and (is_dcp_folder(path) or "model" in folder_files(path))


def is_dcp_folder(path: Path) -> bool:
    """Whether torch.distributed.checkpoint has saved it."""
    return (path / ".metadata").is_file()


def age(path: Path) -> tuple[float, int, str]:
    """When it was saved; of two with one time the newer generation counts more."""
    generation = path.suffix[1:]
    try:
        header, is_ours = header_of(path) if path.is_file() else (None, False)
        saved_at = tree_of(header.metadata)["saved_at"] if header and is_ours else None
    except (CheckpointError, KeyError, TypeError):
        saved_at = None
    time = saved_at if isinstance(saved_at, (int, float)) else path.stat().st_mtime
    return time, -int(generation) if generation.isdecimal() else 0, path.name


def _is_checkpoint(path: Path) -> bool:
    if path.is_dir():
        return is_checkpoint_folder(path)
    return path.name.endswith(_ENDINGS) or _is_ours(path)


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
