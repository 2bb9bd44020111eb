"""A script, folder or module run as a true `__main__`, and how it ended.

The words and the exit code are those that the interpreter would have given.
"""

from __future__ import annotations

import _io
import atexit
import builtins
import contextlib
import errno
import importlib.util
import io
import itertools
import os
import runpy
import signal
import sys
import threading
import traceback
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import TracebackType
from typing import Any

from stayfinite.errors import PeerLostError, TrainingAbortedError

_launcher: list[types.ModuleType] = []


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to run: a script, a folder or archive with a `__main__.py`, or a module (`-m`)."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @staticmethod
    def of(words: Sequence[str]) -> Target:
        """The target that these words name after `python`."""
        is_module = words[0] == "-m"
        name, *args = words[is_module:]
        return Target(name=name, args=tuple(args), is_module=is_module)

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
    # Whoever started us may still hold code of the old __main__, so it is kept alive.
    _launcher.append(sys.modules["__main__"])
    main = types.ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    # The interpreter joins and does not normalise: "../x.py" stays visible in __file__.
    path = os.path.join(os.getcwd(), target.name)
    is_package = not target.is_module and (os.path.isdir(path) or zipfile.is_zipfile(path))
    sys.argv[:] = ["-m" if target.is_module else target.name, *target.args]
    if not sys.flags.safe_path:
        sys.path[0] = path if is_package else target.folder
    # The private one of runpy is what `python -m` itself calls: the module is the true __main__.
    if target.is_module:
        runpy._run_module_as_main(target.name)  # type: ignore[attr-defined]
    elif is_package:
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        _run_file(main, path)


def _run_file(main: types.ModuleType, path: str) -> None:
    is_compiled = path.endswith(".pyc")
    main.__loader__ = (SourcelessFileLoader if is_compiled else SourceFileLoader)("__main__", path)
    main.__file__ = path
    main.__dict__["__cached__"] = None
    if is_compiled:
        code = main.__loader__.get_code("__main__")
        assert code is not None
    else:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
INCIDENT_CODE = 3


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The script's own exit code, and whether Ctrl-C ended it."""

    code: int = 0
    interrupted: bool = False


def ending_of(
    run: Callable[[], None],
    *,
    is_consequence: Callable[[BaseException], bool],
    crashed: Callable[[BaseException], None] = lambda error: None,
) -> Ending:
    """Run to the very end, exit handlers included, and say how it ended.

    `crashed` hears of an error of the script's own while its frames are alive. Tracebacks are
    printed as the interpreter prints them, less our own frames; none for an error that is only
    a consequence of a stop of ours.
    """
    error = _error_of(run)
    if error is not None and not isinstance(error, (TrainingAbortedError, KeyboardInterrupt)):
        crashed(error)
    if error is None:
        ending = Ending()
    elif isinstance(error, SystemExit):
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
        ending = Ending(code=code if isinstance(code, int) else 1)
    else:
        ending = Ending(code=1, interrupted=isinstance(error, KeyboardInterrupt))
        if not is_consequence(error):
            _show(error)
    del error  # it holds the script's frames, and they hold its tensors
    _run_exit_handlers()
    return ending


def is_ours(error: BaseException | None) -> bool:
    """Whether the error is our own stop, not something that the script made of it."""
    return isinstance(error, TrainingAbortedError) and not isinstance(error, PeerLostError)


def leave(ending: Ending, code: int) -> None:
    """End this process with the code; after Ctrl-C by the signal itself, as python does."""
    if ending.interrupted and code == 1:
        flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(code)


def flush() -> None:
    """Push out what the script printed, so that our words come after it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def without_our_frames(error: BaseException) -> BaseException:
    """The error with every frame of this package taken out of its tracebacks."""
    for link in _chain(error):
        link.__traceback__ = _trim(link.__traceback__)
        if is_ours(link.__context__):
            link.__context__ = None
        if is_ours(link.__cause__):
            link.__cause__ = None
    return error


def watch_threads() -> None:
    """Keep our own stop from being printed as a crash of the thread that it ended."""
    theirs = threading.excepthook

    def excepthook(args: threading.ExceptHookArgs) -> None:
        if is_ours(args.exc_value):
            return
        if args.exc_value is not None:
            without_our_frames(args.exc_value)
        theirs(args)

    threading.excepthook = excepthook


def watch_unraisable() -> None:
    """Keep our own stop from being printed where it can go no further: in `__del__`, at exit."""
    theirs = sys.unraisablehook

    def unraisablehook(unraisable: sys.UnraisableHookArgs) -> None:
        if not is_ours(unraisable.exc_value):
            theirs(unraisable)

    sys.unraisablehook = unraisablehook


def watch_sudden_exit(finish: Callable[[Ending], int]) -> None:
    """Have `finish` run, and give the exit code, when the script calls `os._exit`."""
    theirs = os._exit

    def _exit(status: int) -> None:
        os._exit = theirs
        try:
            status = finish(Ending(code=status))
        finally:
            theirs(status)

    os._exit = _exit  # type: ignore[assignment]


def _error_of(run: Callable[[], None]) -> BaseException | None:
    # Handed out of the except block: an excepthook must not find an error being handled.
    try:
        run()
    except BaseException as error:
        return error
    return None


def _show(error: BaseException) -> None:
    error = without_our_frames(error)
    sys.last_type, sys.last_value = type(error), error
    sys.last_traceback = error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as second:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(without_our_frames(second), file=sys.stderr)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)


def _run_exit_handlers() -> None:
    # The order of the interpreter's own shutdown: threads first, then atexit.
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:
        _show(error)
    with contextlib.suppress(SystemExit):
        atexit._run_exitfuncs()


def _chain(error: BaseException) -> Iterator[BaseException]:
    todo, seen = [error], set()
    while todo:
        link = todo.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        todo += [e for e in (link.__cause__, link.__context__) if e is not None]
        if isinstance(link, BaseExceptionGroup):
            todo += link.exceptions


def _trim(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
            kept.append(trace)
        trace = trace.tb_next
    for here, following in itertools.zip_longest(kept, kept[1:]):
        here.tb_next = following
    return kept[0] if kept else None


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
        with contextlib.suppress(ValueError):  # it is no compiled file
            if os.path.realpath(importlib.util.source_from_cache(real)) in instead:
                raise FileNotFoundError(errno.ENOENT, "this was compiled before the change", path)
        return before(path)

    # The import system asks one of them, runpy the other.
    for module in (io, _io):
        setattr(module, "open_code", open_code)  # noqa: B010
