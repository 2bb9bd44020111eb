"""Frameworks and trackers: a file for each, loaded only where its package is used."""

from __future__ import annotations

import contextlib
import re
from importlib import metadata

from stayfinite.errors import PackageError


def check_package(package: str, *, extra: str, like: str | None = None) -> None:
    """PackageError, with the command that installs it, if it is missing or too old.

    `extra` is ours that asks for it; how old it may be is written there, or `like` another
    package of the same versions. A version that cannot be read is not held against it.
    """
    command = f"pip install 'stayfinite[{extra}]'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise PackageError(f"{package} is not installed: {command}") from None
    wanted: list[str] = []
    with contextlib.suppress(metadata.PackageNotFoundError):  # else it is run from its source
        wanted = metadata.requires("stayfinite") or []
    pattern = rf"{re.escape(like or package)}\s*>=\s*([\d.]+)"
    least = next((match[1] for each in wanted if (match := re.match(pattern, each))), None)
    if least and _numbers(found) < _numbers(least):
        raise PackageError(f"{package} {found} is too old, {least} is needed: {command}")


def _numbers(version: str) -> list[int]:
    """The release, without the zeros at its end: 2.4 is 2.4.0."""
    release = re.findall(r"^[\d.]*", version)[0]
    numbers = [int(part) for part in release.split(".") if part]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
