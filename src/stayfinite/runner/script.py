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
import os
import runpy
import signal
import sys
import threading
import traceback
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import TracebackType
from typing import Any

from stayfinite.errors import TrainingAbortedError

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
        ending = Ending(code=_exit_code(error))
    else:
        ending = Ending(code=1, interrupted=isinstance(error, KeyboardInterrupt))
        if not is_consequence(error):
            _show(error)
    del error  # it holds the script's frames, and they hold its tensors
    _run_exit_handlers()
    return ending


def is_ours(error: BaseException | None) -> bool:
    """Whether the error is our own stop, not something that the script made of it."""
    return isinstance(error, TrainingAbortedError)


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


def _exit_code(request: SystemExit) -> int:
    code = request.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


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
        if not _is_our_frame(trace):
            kept.append(trace)
        trace = trace.tb_next
    for here, following in zip(kept, [*kept[1:], None], strict=False):
        here.tb_next = following
    return kept[0] if kept else None


def _is_our_frame(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(PACKAGE)


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
