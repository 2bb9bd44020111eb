"""The source files of a capsule in a folder of their own, and nowhere else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from stayfinite.capsule.contents import Capsule
from stayfinite.capsule.names import check_folders, check_names
from stayfinite.errors import CapsuleError


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
        _write(homes[each.root] / each.name, each.text)
    own = [homes[0] / path for path in capsule.code.paths]
    others = [home for root, home in homes.items() if root]
    return Unpacked(project=homes[0], paths=(*own, *others))


def _write(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(text)
    except FileExistsError as error:
        raise CapsuleError(f"{path} is there already.") from error
