"""Folders and shard indices as transformers, accelerate, diffusers and peft write them."""

from __future__ import annotations

import json
from pathlib import Path

from stayfinite.errors import CheckpointError

_MODELS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "adapter_model.safetensors",
)
_OTHERS = {
    "optimizer": ("optimizer.pt", "optimizer.bin"),
    "scheduler": ("scheduler.pt", "scheduler.bin"),
    "scaler": ("scaler.pt",),
}
_STEP = "trainer_state.json"


def folder_files(folder: Path) -> dict[str, Path]:
    """The files of a checkpoint folder by section; the first model file that is there."""
    choices = {"model": _MODELS, **_OTHERS}
    there = {
        section: [folder / name for name in names if (folder / name).is_file()]
        for section, names in choices.items()
    }
    return {section: files[0] for section, files in there.items() if files}


def step_of(folder: Path) -> int | None:
    """The step that transformers' Trainer noted, if it did."""
    try:
        step = json.loads((folder / _STEP).read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


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
