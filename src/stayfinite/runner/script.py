"""A script, folder or module run as a true `__main__`, the way the interpreter runs it."""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
import types
import zipfile
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader, SourcelessFileLoader

_launcher: list[types.ModuleType] = []


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to run: a script, a folder or archive with a `__main__.py`, or a module (`-m`)."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def command(self) -> list[str]:
        """The words that follow `python` on a command line."""
        return [*(["-m"] if self.is_module else []), self.name, *self.args]

    @property
    def folder(self) -> str:
        """The folder that paths in a report are relative to."""
        if self.is_module:
            return os.getcwd()
        path = os.path.realpath(self.name)
        return path if os.path.isdir(path) else os.path.dirname(path)


def problem(target: Target) -> str | None:
    """Why the target cannot be run, in one line; None when it can."""
    name = target.name
    if target.is_module:
        return None
    if not os.path.exists(name):
        return f"there is no script {name!r} (looked in {os.getcwd()})."
    if os.path.isdir(name):
        main = os.path.join(name, "__main__.py")
        return None if os.path.isfile(main) else f"{name!r} is a folder without a __main__.py."
    try:
        with open(name, "rb"):
            return None
    except OSError as error:
        return f"{name!r} cannot be read: {error.strerror}."


def execute(target: Target) -> None:
    """Run the target to its end in this process; what it raises leaves from here."""
    main = _fresh_main()
    if target.is_module:
        _take_over("-m", target.args, folder=os.getcwd())
        runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]
    elif os.path.isdir(target.name) or zipfile.is_zipfile(target.name):
        _take_over(target.name, target.args, folder=_absolute(target.name))
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        _take_over(target.name, target.args, folder=target.folder)
        _run_file(main, _absolute(target.name))


def _fresh_main() -> types.ModuleType:
    # Whoever started us may still hold code of the old __main__, so it is kept alive.
    _launcher.append(sys.modules["__main__"])
    main = types.ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def _take_over(first: str, args: tuple[str, ...], *, folder: str) -> None:
    sys.argv[:] = [first, *args]
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _run_file(main: types.ModuleType, path: str) -> None:
    loader = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
    main.__loader__ = loader("__main__", path)
    main.__file__ = path
    main.__dict__["__cached__"] = None
    exec(_code(path), main.__dict__)


def _code(path: str) -> types.CodeType:
    if path.endswith(".pyc"):
        code = SourcelessFileLoader("__main__", path).get_code("__main__")
        assert code is not None
        return code
    with io.open_code(path) as file:
        source = file.read()
    return compile(source, path, "exec", dont_inherit=True)


def _absolute(path: str) -> str:
    # The interpreter joins and does not normalise: "../x.py" stays visible in __file__.
    if os.path.isabs(path):
        return path
    return os.path.join(os.getcwd(), path)
