"""Other text for some source files of a process; the files themselves stay as they are."""

from __future__ import annotations

import _io
import errno
import importlib.util
import io
import os
import sys
from typing import Any


def read_instead(texts: dict[str, str]) -> None:
    """Let Python read other files for these ones, here and in processes that it forks."""
    if not texts:
        return
    instead = {os.path.realpath(path): text for path, text in texts.items()}
    sys.dont_write_bytecode = True  # else the changed code would be found there later
    before = io.open_code

    def open_code(path: str) -> Any:
        real = os.path.realpath(path)
        if real in instead:
            return before(instead[real])
        if _source_of(real) in instead:
            raise FileNotFoundError(errno.ENOENT, "this was compiled before the change", path)
        return before(path)

    # The import system asks one of them, runpy the other.
    for module in (io, _io):
        setattr(module, "open_code", open_code)  # noqa: B010


def _source_of(path: str) -> str | None:
    if not path.endswith(".pyc"):
        return None
    try:
        return os.path.realpath(importlib.util.source_from_cache(path))
    except ValueError:
        return None
