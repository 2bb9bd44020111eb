"""The file of a capsule: sealed when it is written, read with suspicion, unpacked safely."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from stayfinite.capsule.contents import (
    FORMAT,
    MIB,
    Capsule,
    capsule_of,
    check_folders,
    check_names,
    pack,
)
from stayfinite.checkpoint.folder import written_beside
from stayfinite.checkpoint.format import sealed_pieces, tally, without_repeats
from stayfinite.checkpoint.save import storable
from stayfinite.checkpoint.stream import (
    Reading,
    header_of,
    one_line_errors,
    open_file,
    read_safetensors,
)
from stayfinite.checkpoint.values import Held, view_held
from stayfinite.errors import CapsuleError, CheckpointError

VERSION, CONTENTS = "capsule", "contents"
"""The keys of a capsule in the metadata of its safetensors header."""
LARGEST_FILE, LARGEST_HEADER = 160 * MIB, 4 * MIB
MOST_TENSORS = 4_000
MOST_CONTAINERS = 100_000  # brackets in the header: a million of them take seconds to parse
# What data raise that is not as we write it. A tensor that cannot be viewed is a RuntimeError.
_SENSELESS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)


@torch.no_grad()
def write_capsule(path: str | os.PathLike[str], capsule: Capsule) -> Path:
    """Write the file whole or not at all, with mode 0600; CapsuleError says why it cannot be.

    An older capsule of that name is replaced; any other file is not.
    """
    target = Path(os.path.realpath(path))
    if (reason := why_not(target)) is not None:
        raise CapsuleError(reason)
    try:
        tree, tensors = pack(capsule)
        stored, views = storable(tensors)
        text = json.dumps({**tree, "views": views}, separators=(",", ":"), allow_nan=False)
        size, most = sum(each.nbytes for each in stored.values()), LARGEST_FILE - LARGEST_HEADER
        if len(text) > LARGEST_HEADER // 2 or size > most:
            raise CapsuleError(
                f"the capsule would have {len(text):,} bytes of facts and {size:,} of tensors; "
                f"{LARGEST_HEADER // 2:,} and {most:,} are possible."
            )
        tallies = {name: tally(tensor) for name, tensor in tensors.items()}
        metadata = {VERSION: str(FORMAT), CONTENTS: text}
        pieces = sealed_pieces(stored, tallies, metadata)
        with written_beside(target, pieces, is_private=True) as temporary:
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
    except (*_SENSELESS, AssertionError) as error:
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
    if facts.st_size > LARGEST_FILE:
        raise CapsuleError(
            f"it has {facts.st_size:,} bytes, and a capsule has at most {LARGEST_FILE:,}."
        )
    with open_file(file) as source:
        length = int.from_bytes(source.bytes(0, min(8, source.size)), "little")
        if length > min(LARGEST_HEADER, source.size - 8):
            raise CapsuleError("it has no header of a capsule, or was cut off.")
        header = source.bytes(8, 8 + length)
    if header.count(b"[") + header.count(b"{") > MOST_CONTAINERS:
        raise CapsuleError(f"its header has more than {MOST_CONTAINERS:,} brackets.")
    if header.count(b"data_offsets") > MOST_TENSORS:
        raise CapsuleError(f"it has more than {MOST_TENSORS:,} tensors.")


def _read(file: Path) -> Capsule:
    found = read_safetensors(file, Reading(keep=lambda name: True))
    if not found.is_ours or VERSION not in found.header.metadata:
        raise CapsuleError("it is not a capsule.")
    if found.problems:
        raise CapsuleError(f"it was damaged: {found.problems[0].key} is not as it was written.")
    version = found.header.metadata[VERSION]
    if version != str(FORMAT):
        raise CapsuleError(
            f"it has format {version[:20]!r}, and this version of stayfinite reads "
            f"{str(FORMAT)!r}. Update stayfinite."
        )
    tree = json.loads(found.header.metadata[CONTENTS], object_pairs_hook=without_repeats)
    held: dict[str, Held] = {**found.held, **view_held(tree["views"], found.held)}
    return capsule_of(tree, held)


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """Where the project is, and the folders in which Python has to look for its modules."""

    project: Path
    paths: tuple[Path, ...]


def unpack(capsule: Capsule, folder: Path) -> Unpacked:
    """Write the files into this folder, which must be empty; nothing there is overwritten."""
    check_names((each.root, each.name) for each in capsule.sources)
    check_folders([capsule.code.folder, *capsule.code.paths])
    roots = sorted({0, *(each.root for each in capsule.sources)})
    homes = {root: folder / (f"project-{root}" if root else "project") for root in roots}
    for home in homes.values():
        home.mkdir()
    for each in capsule.sources:
        path = homes[each.root] / each.name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:  # "x" follows no link
            with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
                file.write(each.text)
        except FileExistsError as error:
            raise CapsuleError(f"{path} is there already.") from error
    own = [homes[0] / path for path in capsule.code.paths]
    others = [home for root, home in homes.items() if root]
    return Unpacked(project=homes[0], paths=(*own, *others))
