"""Writes a capsule: a sealed safetensors file that only its owner can read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from stayfinite.capsule import limits
from stayfinite.capsule.contents import FORMAT, Capsule
from stayfinite.capsule.packing import packed
from stayfinite.capsule.reading import CONTENTS, VERSION, is_capsule
from stayfinite.checkpoint.collecting import storable
from stayfinite.checkpoint.files import written_beside
from stayfinite.checkpoint.format.sealed import sealed_pieces
from stayfinite.checkpoint.format.tally import tally
from stayfinite.errors import CapsuleError, CheckpointError


@torch.no_grad()
def write_capsule(path: str | os.PathLike[str], capsule: Capsule) -> Path:
    """Write the file whole or not at all, with mode 0600; CapsuleError says why it cannot be.

    An older capsule of that name is replaced; any other file is not.
    """
    target = Path(os.path.realpath(path))
    if (reason := why_not(target)) is not None:
        raise CapsuleError(reason)
    try:
        tree, tensors = packed(capsule)
        stored, views = storable(tensors)
        text = json.dumps({**tree, "views": views}, separators=(",", ":"), allow_nan=False)
        _check_size(text, sum(each.nbytes for each in stored.values()))
        tallies = {name: tally(tensor) for name, tensor in tensors.items()}
        metadata = {VERSION: str(FORMAT), CONTENTS: text}
        with written_beside(
            target, sealed_pieces(stored, tallies, metadata), is_private=True
        ) as temporary:
            os.replace(temporary, target)
    except OSError as error:
        raise CapsuleError(f"{target} cannot be written: {error.strerror or error}.") from error
    except CheckpointError as error:
        raise CapsuleError(f"{target} cannot be written: {error}") from error
    return target


def why_not(path: Path) -> str | None:
    """Why no capsule can be written there, in one line; None when one can."""
    if not path.parent.is_dir():
        return f"{path} cannot be written: there is no folder {path.parent}."
    if path.is_dir():
        return f"{path} is a folder; give the path of a file in it."
    if os.path.lexists(path) and not is_capsule(path):
        return f"{path} is there already, and is no capsule; give another name."
    if not os.access(path.parent, os.W_OK):
        return f"{path} cannot be written: {path.parent} may not be changed."
    return None


def _check_size(text: str, size: int) -> None:
    if len(text) > limits.HEADER // 2 or size > limits.FILE - limits.HEADER:
        raise CapsuleError(
            f"the capsule would have {len(text):,} bytes of facts and {size:,} of tensors; "
            f"{limits.HEADER // 2:,} and {limits.FILE - limits.HEADER:,} are possible."
        )
