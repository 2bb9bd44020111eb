"""Effects that the interpreter's audit events do not tell of."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from stayfinite.runner.audit import Audit
from stayfinite.runner.imports import after_import

_replaced: list[Any] = []


def note_native_writers(audit: Audit) -> None:
    """Hear of files that torch and safetensors write without the interpreter's knowledge."""

    def torch_serialization(module: ModuleType) -> None:
        writer = module._open_zipfile_writer_file
        theirs = writer.__init__

        def __init__(self: Any, name: Any) -> None:  # noqa: N807
            audit.wrote(name)
            theirs(self, name)

        writer.__init__ = __init__

    def torch_itself(module: ModuleType) -> None:
        # Native classes with a method that opens the file of its first argument.
        native = module._C
        kineto = getattr(native._autograd, "_ProfilerResult", None)
        for kind, name in ((native.ScriptModule, "save"), (kineto, "save")):
            if kind is not None:
                setattr(kind, name, _noted(getattr(kind, name), audit))

    def safetensors(module: ModuleType) -> None:
        theirs = module.serialize_file

        def serialize_file(data: Any, filename: Any, *args: Any, **options: Any) -> Any:
            audit.wrote(filename)
            return theirs(data, filename, *args, **options)

        module.serialize_file = serialize_file  # type: ignore[attr-defined]

    for name in ("mkfifo", "mknod"):  # these have no audit event
        if hasattr(os, name):
            setattr(os, name, _noted(getattr(os, name), audit, at=0))
    after_import("torch.serialization", torch_serialization)
    after_import("torch", torch_itself)
    after_import("safetensors", safetensors)


def _noted(theirs: Callable[..., Any], audit: Audit, *, at: int = 1) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def noted(*args: Any, **options: Any) -> Any:
        if len(args) > at:
            audit.wrote(args[at])
        return theirs(*args, **options)

    return noted


def note_stdin(audit: Audit) -> None:
    """Hear of it when the script reads a piped standard input, which cannot be read twice."""
    theirs = sys.stdin
    if not isinstance(theirs, io.TextIOWrapper) or theirs.isatty():
        return

    class Noted(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            audit.read_stdin()
            return super().readinto(buffer)

        def readall(self) -> bytes:
            audit.read_stdin()
            return super().readall()

    _replaced.append(theirs)
    raw = Noted(theirs.fileno(), "rb", closefd=False)
    raw.name = theirs.buffer.name
    sys.stdin = io.TextIOWrapper(
        io.BufferedReader(raw), encoding=theirs.encoding, errors=theirs.errors
    )
    sys.__stdin__ = sys.stdin  # type: ignore[misc]
