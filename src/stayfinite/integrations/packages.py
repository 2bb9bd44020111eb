"""Whether the package of a framework is there and new enough; if not, what to type."""

from __future__ import annotations

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
    least = _least(like or package)
    if least and _numbers(found) < _numbers(least):
        raise PackageError(f"{package} {found} is too old, {least} is needed: {command}")


def _least(package: str) -> str | None:
    try:
        wanted = metadata.requires("stayfinite") or []
    except metadata.PackageNotFoundError:  # run from its source
        return None
    found = (re.match(rf"{re.escape(package)}\s*>=\s*([\d.]+)", each) for each in wanted)
    return next((each[1] for each in found if each), None)


def _numbers(version: str) -> list[int]:
    """The release, without the zeros at its end: 2.4 is 2.4.0."""
    release = re.findall(r"^[\d.]*", version)[0]
    numbers = [int(part) for part in release.split(".") if part]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
