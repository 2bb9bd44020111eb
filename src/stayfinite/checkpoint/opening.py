"""Opens a checkpoint of any layout, by what is in it rather than by its name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from stayfinite.checkpoint.folders import is_dcp_folder
from stayfinite.checkpoint.foreign.huggingface import folder_files, shards_of, step_of
from stayfinite.checkpoint.foreign.torch_files import (
    contents_of_sections,
    is_torch_file,
    module_record,
    read_torch,
)
from stayfinite.checkpoint.format.contents import Contents
from stayfinite.checkpoint.format.held import hold_all
from stayfinite.checkpoint.format.own import own_contents, tree_of
from stayfinite.checkpoint.format.reading import Reading, read_safetensors
from stayfinite.checkpoint.format.source import one_line_errors
from stayfinite.checkpoint.problems import Problem, refusal
from stayfinite.errors import CheckpointError

Opened = tuple[Contents, list[Problem]]


def open_checkpoint(path: Path, reading: Reading) -> Opened:
    """What the checkpoint holds, and what was damaged; CheckpointError if it cannot be read."""
    with one_line_errors(path):
        if not path.exists():
            raise FileNotFoundError(2, "there is no such file or folder")
        if path.is_dir():
            return _open_folder(path, reading)
        if path.name.endswith(".index.json"):
            return _open_shards(path, reading)
        if is_torch_file(path):
            tree, problems = read_torch(path, reading)
            return contents_of_sections(hold_all(tree, "file")), problems
        return _open_safetensors(path, reading)


def is_whole(path: Path) -> bool:
    """Whether a checkpoint of any layout can be read and no checksum differs."""
    try:
        _, problems = open_checkpoint(path, Reading())
    except CheckpointError:
        return False
    return not problems


def verify(path: Path) -> None:
    """Read one of our files back; CheckpointError if it is not to the byte what was written."""
    file = read_safetensors(path, Reading(scan=True))
    if file.problems or not file.is_ours:
        raise refusal("the disk gave back something else than was written", file.problems)


def _open_safetensors(path: Path, reading: Reading) -> Opened:
    file = read_safetensors(path, reading)
    if not file.is_ours:
        return Contents(layout="safetensors", models=(module_record(file.held),)), file.problems
    return own_contents(tree_of(file.header.metadata), file.held), file.problems


def _open_shards(index: Path, reading: Reading) -> Opened:
    tensors: dict[str, Any] = {}
    problems: list[Problem] = []
    for shard, names in shards_of(index).items():
        found = _tensors_in(shard, reading, problems)
        tensors |= {name: found[name] for name in names if name in found}
        problems += [
            Problem(kind="missing", key=name, message=f"is not in {shard.name}, as the index says.")
            for name in names
            if name not in found
        ]
    return Contents(layout="huggingface", models=(module_record(tensors),)), problems


def _tensors_in(path: Path, reading: Reading, problems: list[Problem]) -> dict[str, Any]:
    with one_line_errors(path):
        if is_torch_file(path):
            tree, found = read_torch(path, reading)
            problems += found
            return dict(hold_all(tree, "file"))
        file = read_safetensors(path, reading)
        problems += file.problems
        return file.held


def _open_folder(path: Path, reading: Reading) -> Opened:
    if is_dcp_folder(path):
        # Late: it imports torch.distributed.checkpoint, which takes a tenth of a second.
        from stayfinite.checkpoint.foreign.dcp import read_dcp

        return contents_of_sections(hold_all(read_dcp(path), "file"), layout="dcp"), []
    files = folder_files(path)
    if "model" not in files:
        raise CheckpointError(
            "it is a folder without .metadata, model.safetensors or an index of shards."
        )
    contents, problems = open_checkpoint(files.pop("model"), reading)
    sections: dict[str, Any] = {}
    for name, file in files.items():
        sections[name], found = read_torch(file, reading)
        problems = problems + found
    rest = contents_of_sections(hold_all({"model": {}, **sections}, "file"), layout="huggingface")
    return dataclasses.replace(rest, models=contents.models, step=step_of(path)), problems
