"""Names of files in a capsule: only those that stay inside the folder they are unpacked into."""

from __future__ import annotations

from collections.abc import Iterable

from stayfinite.errors import CapsuleError

_LONGEST, _DEEPEST = 240, 24
_FORBIDDEN = set('\\:*?"<>|')


def is_safe(name: str) -> bool:
    """Whether it is a plain relative path of a Python file, in every file system."""
    parts = name.split("/")
    return (
        name.endswith(".py")
        and len(name) <= _LONGEST
        and len(parts) <= _DEEPEST
        and all(_is_plain(part) for part in parts)
    )


def _is_plain(part: str) -> bool:
    if part in ("", ".", "..") or part != part.strip() or part.endswith("."):
        return False
    return part.isprintable() and not _FORBIDDEN & set(part)


def check_names(names: Iterable[tuple[int, str]]) -> None:
    """CapsuleError for a name that leads elsewhere, comes twice, or is also a folder."""
    files: set[tuple[int, str]] = set()
    folders: set[tuple[int, str]] = set()
    for root, name in names:
        if not is_safe(name):
            raise CapsuleError(f"it has a source file {name[:80]!r}, which is no plain name.")
        lower = name.casefold()
        if (root, lower) in files:
            raise CapsuleError(f"it has the source file {name!r} twice.")
        files.add((root, lower))
        parts = lower.split("/")
        folders |= {(root, "/".join(parts[:depth])) for depth in range(1, len(parts))}
    if both := files & folders:
        raise CapsuleError(f"{min(both)[1]!r} is both a file and a folder in it.")


def check_folders(names: Iterable[str]) -> None:
    """CapsuleError for a folder that is not within the project."""
    for name in names:
        parts = [] if name == "." else name.split("/")
        if len(parts) > _DEEPEST or not all(_is_plain(part) for part in parts):
            raise CapsuleError(
                f"it names the folder {name[:80]!r}, which is none within a project."
            )
