"""Folders and shard indices as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path

from stayfinite.errors import CheckpointError

_MODELS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
_OTHERS = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}


def folder_files(folder: Path) -> dict[str, Path]:
    """The files of a checkpoint folder by section; the first model file that is there."""
    models = [folder / name for name in _MODELS if (folder / name).is_file()]
    others = {key: folder / name for key, name in _OTHERS.items() if (folder / name).is_file()}
    return {"model": models[0], **others} if models else others


def shards_of(index: Path) -> dict[Path, list[str]]:
    """The names of the tensors in each shard; CheckpointError where the index makes no sense."""
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
        entries = [(str(name), str(file)) for name, file in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("it is no index of shards: it has no weight_map.") from error
    shards: dict[Path, list[str]] = {}
    for name, file in entries:
        if Path(file).name != file:
            raise CheckpointError(f"its index names {file!r}, which is not in its folder.")
        shards.setdefault(index.parent / file, []).append(name)
    return shards
