"""Whether a file is what was saved, byte for byte."""

from __future__ import annotations

from pathlib import Path

from stayfinite.checkpoint.format.reading import Reading, read_safetensors
from stayfinite.checkpoint.opening import open_checkpoint
from stayfinite.checkpoint.problems import refusal
from stayfinite.errors import CheckpointError


def verify(path: Path) -> None:
    """Read one of our files back; CheckpointError if any byte differs from what was written."""
    file = read_safetensors(path, Reading())
    if file.problems or not file.is_ours:
        raise refusal("the disk gave back something else than was written", file.problems)


def is_whole(path: Path) -> bool:
    """Whether a checkpoint of any layout can be read and no checksum differs."""
    try:
        _, problems = open_checkpoint(path, Reading())
    except CheckpointError:
        return False
    return not problems
