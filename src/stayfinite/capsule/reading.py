"""Reads a capsule that anybody may have made: bounded in time and memory, and nothing is run."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stayfinite.capsule import limits
from stayfinite.capsule.contents import FORMAT, Capsule
from stayfinite.capsule.packing import unpacked
from stayfinite.checkpoint.format.held import Held
from stayfinite.checkpoint.format.own import viewed
from stayfinite.checkpoint.format.reading import Reading, header_of, read_safetensors
from stayfinite.checkpoint.format.source import one_line_errors, opened
from stayfinite.errors import CapsuleError, CheckpointError

VERSION, CONTENTS = "capsule", "contents"
"""The keys of a capsule in the metadata of its safetensors header."""

# What data raise that is not as we write it. A tensor that cannot be viewed is a RuntimeError.
_SENSELESS = (
    (ValueError, TypeError, KeyError, IndexError, AttributeError)
    + (ArithmeticError, RuntimeError, AssertionError)
)  # fmt: skip


def read_capsule(path: str | os.PathLike[str]) -> Capsule:
    """The capsule in this file; CapsuleError, in well under a second, if it is not sound.

    Nothing in it is run and nothing is written.
    """
    file = Path(path)
    try:
        with one_line_errors(file):
            _check_bounds(file)
            return _read(file)
    except CapsuleError as error:
        raise CapsuleError(f"{file} cannot be used: {error}") from error
    except CheckpointError as error:
        raise CapsuleError(str(error)) from error
    except _SENSELESS as error:
        raise CapsuleError(
            f"{file} cannot be used: it is not as this version of stayfinite writes a capsule."
        ) from error


def is_capsule(path: Path) -> bool:
    """Whether the file says that it is one; it may be damaged."""
    try:
        _check_bounds(path)
        return VERSION in header_of(path)[0].metadata
    except (CapsuleError, CheckpointError, OSError):
        return False


def _check_bounds(file: Path) -> None:
    """CapsuleError for what would take long to read, before it is."""
    facts = os.stat(file)
    if not stat.S_ISREG(facts.st_mode):
        raise CapsuleError("it is not a file.")
    if facts.st_size > limits.FILE:
        raise CapsuleError(
            f"it has {facts.st_size:,} bytes, and a capsule has at most {limits.FILE:,}."
        )
    with opened(file) as source:
        length = int.from_bytes(source.bytes(0, min(8, source.size)), "little")
        if length > min(limits.HEADER, source.size - 8):
            raise CapsuleError("it has no header of a capsule, or was cut off.")
        header = source.bytes(8, 8 + length)
    if header.count(b"[") + header.count(b"{") > limits.CONTAINERS:
        raise CapsuleError(f"its header has more than {limits.CONTAINERS:,} brackets.")
    if header.count(b"data_offsets") > limits.TENSORS:
        raise CapsuleError(f"it has more than {limits.TENSORS:,} tensors.")


def _read(file: Path) -> Capsule:
    found = read_safetensors(file, Reading(keep=lambda name: True))
    if not found.is_ours or VERSION not in found.header.metadata:
        raise CapsuleError("it is not a capsule.")
    if found.problems:
        raise CapsuleError(f"it was damaged: {found.problems[0].key} is not as it was written.")
    tree = _tree(found.header.metadata)
    held: dict[str, Held] = {**found.held, **viewed(tree["views"], found.held)}
    return unpacked(tree, held)


def _tree(metadata: Mapping[str, str]) -> Any:
    version = metadata[VERSION]
    if version != str(FORMAT):
        raise CapsuleError(
            f"it has format {version[:20]!r}, and this version of stayfinite reads "
            f"{str(FORMAT)!r}. Update stayfinite."
        )
    return json.loads(metadata[CONTENTS], object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CapsuleError("a name comes twice in it.")
    return found
