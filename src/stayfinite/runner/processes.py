"""Processes of a run: started with multiprocessing by the script, or as ranks."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from stayfinite.records import Incident
from stayfinite.report.sinks import rank_here as rank
from stayfinite.runner.imports import after_import
from stayfinite.runner.plan import (
    ROOT,
    VARIABLE,
    ProcessRecord,
    child_command,
    first_incident,
    is_running,
    load_records,
    read_plan,
)
from stayfinite.runner.script import (
    INCIDENT_CODE,
    Ending,
    watch_sudden_exit,
    watch_threads,
    without_our_frames,
)
from stayfinite.runner.verdict import signal_name
from stayfinite.runner.watcher import Watch, end_peers, is_consequence, watch_group
from stayfinite.safely import say, step_aside
from stayfinite.text import one_line

_WORKER = "torch.utils.data._utils.worker"

_JOIN = """
import sys
sys.path.insert(0, {root!r})
try:
    from stayfinite.runner.processes import join
    join({plan!r}, {key!r})
except Exception as error:
    sys.stderr.write(f"stayfinite: a child process is not watched ({{error}}).\\n")
finally:
    sys.path.remove({root!r})
"""


def watch_children(watch: Watch) -> None:
    """Have every process that this one starts watched, less the workers of a DataLoader."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _forked(watch))
    after_import("multiprocessing.process", lambda module: _watch_processes(module, watch))
    after_import("multiprocessing.spawn", lambda module: _watch_spawn(module, watch))
    watch_group(watch)
    watch_launcher(watch)


def join(plan_path: str, key: str) -> None:
    """Begin to watch this process, which a watched one has spawned."""
    watch = Watch(read_plan(plan_path), key=key)
    watch.listeners.append(tell_once)
    watch.start()
    watch_children(watch)
    watch_threads()
    watch_sudden_exit(lambda ending: exit_code(watch, ending))


def exit_code(watch: Watch, ending: Ending) -> int:
    """End the watch over a process that another one reports for; the result is its exit code."""
    watch.code = ending.code
    watch.end()
    with step_aside("ending the other ranks"):
        end_peers(watch)
    return INCIDENT_CODE if watch.has_stopped else ending.code


def deaths() -> dict[int, str]:
    """The processes that this one started and a signal ended, other than by being asked to end."""
    asked = (-signal.SIGTERM, -signal.SIGINT)  # as a pool asks its workers
    # Of a process that another one has started, or that never was, there is no exit code.
    codes = {
        one.pid: one.exitcode
        for one in _known_processes()
        if getattr(one, "_parent_pid", None) == os.getpid()
        and getattr(one, "_popen", None) is not None
        and not _is_loader_worker(one)
    }
    codes |= {one.pid: one.poll() for one in _launched}
    return {
        pid: signal_name(-code)
        for pid, code in codes.items()
        if code is not None and code < 0 and code not in asked
    }


def _known_processes() -> list[Any]:
    process: Any = sys.modules.get("multiprocessing.process")
    return [] if process is None else list(process._dangling)


def _forked(watch: Watch) -> None:
    with step_aside("watching a forked process"):
        watch.after_fork()
        if tell_once not in watch.listeners:
            watch.listeners.insert(0, tell_once)


class _Ticket:
    """Pickles to code that begins the watch where it is unpickled, or to nothing at all."""

    def __init__(self, watch: Watch, key: str) -> None:
        self._code = _JOIN.format(root=ROOT, plan=watch.plan.path, key=key)

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._code, {})


def _watch_spawn(module: ModuleType, watch: Watch) -> None:
    theirs = module.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = theirs(name)
        with step_aside("watching a spawned process"):
            is_loader = any(_is_loader_worker(o) for o in _known_processes() if o.name == name)
            if not watch.is_muted and (not is_loader or watch.plan.sandbox == "audit"):
                # First in the dict, so that it is there before the script's main module is.
                return {"stayfinite": _Ticket(watch, name), **data}
        return data

    module.get_preparation_data = get_preparation_data  # type: ignore[attr-defined]


def _is_loader_worker(process: Any) -> bool:
    target = getattr(process, "_target", None)
    return getattr(target, "__module__", None) == _WORKER


def _watch_processes(module: ModuleType, watch: Watch) -> None:
    theirs = module.BaseProcess._bootstrap

    def _bootstrap(self: Any, *args: Any, **options: Any) -> int:
        with step_aside("watching a child process"):
            if _is_loader_worker(self):
                watch.mute()
            else:
                watch.seeds.take_key_if_none(self.name)
                self.run = _without_our_stop(self, self.run, watch)
        code: int = theirs(self, *args, **options)
        return exit_code(watch, Ending(code=code))

    module.BaseProcess._bootstrap = _bootstrap


def _without_our_stop(process: Any, theirs: Callable[[], None], watch: Watch) -> Callable[[], None]:
    def run() -> None:
        try:
            theirs()
        except SystemExit as error:
            watch.crashed(error)
            raise
        except BaseException as error:
            if is_consequence(error, watch):
                raise SystemExit(INCIDENT_CODE) from None
            watch.crashed(error)
            # What multiprocessing prints for an error in run(), without the frame of this one.
            frame, inner = sys._getframe(1), without_our_frames(error).__traceback__
            error.__traceback__ = TracebackType(inner, frame, frame.f_lasti, frame.f_lineno)
            sys.stderr.write(f"Process {process.name}:\n")
            traceback.print_exception(error)
            raise SystemExit(1) from None

    return run


def tell_once(watch: Watch, incident: Incident) -> None:
    """One line from the first process that knows.

    A parent that waits for this process for ever would otherwise never say why.
    """
    name = "told" if watch.plan.stops else f"told-{incident.step}"
    if is_first(os.path.join(watch.plan.folder, name)):
        say(f"{one_line(incident)}; {watch.plan.what_follows(incident)}.")


def is_first(path: str) -> bool:
    """Whether no other process was here before; this one leaves the file to tell so."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except OSError:
        return False
    return True


_launched: list[Any] = []  # the ranks that this process has started, as torchrun does
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


def watch_launcher(watch: Watch) -> None:
    """Have the ranks watched if this process turns out to be torchrun."""

    def react(module: ModuleType) -> None:
        theirs = module.SubprocessHandler._popen

        def _popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
            with step_aside("watching a rank"):
                args, env = watched(args, env, watch)
            process = theirs(self, args, env)
            _launched.append(process)
            return process

        module.SubprocessHandler._popen = _popen

    after_import(_HANDLER, react)


def watched(
    args: tuple[str, ...], env: dict[str, str], watch: Watch
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and environment that run the same rank under watch; unchanged if not python."""
    if sys.executable not in args:
        return args, env
    at = args.index(sys.executable)
    flags, target = [], list(args[at + 1 :])
    while target and target[0].startswith("-") and target[0] not in ("-m", "-c"):
        flags.append(target.pop(0))
    if not target or target[0] == "-c":
        return args, env
    command = child_command(target, key=rank_key(env), flags=flags)
    return (*args[:at], *command), {**env, VARIABLE: watch.plan.path}


def rank_key(env: Mapping[str, str]) -> str:
    """The key of the process that torchrun starts with these variables."""
    return f"rank-{env.get('RANK', '0')}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"


# Runs that a launcher started side by side, one per rank, as `torchrun -m stayfinite run` does.
#
# There is no parent of ours to report for all, so the ranks of one machine meet in a folder.

GRACE = 1.0  # seconds in which other ranks may report the same step
_PATIENCE = 30.0  # seconds in which the rank that reports for all has done so
_SPEAKER, _SPOKEN = "speaker", "spoken"


def is_launched_rank() -> bool:
    """Whether a launcher started this process as one of its ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def launched_ranks() -> int:
    """How many ranks the launchers have started, on all machines together."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdigit() else 1


def shared_folder() -> str:
    """The folder in which the ranks of this launcher meet; only this user may look into it.

    Ranks that it starts again after a failure have another one.
    """
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    run = "-".join(os.environ.get(name, "") for name in names)
    name = f"stayfinite-{os.getppid()}-{zlib.crc32(run.encode()):08x}"
    folder = os.path.join(tempfile.gettempdir(), name)
    _remove_stale()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and os.stat(folder).st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def records_of_ranks(folder: str) -> list[ProcessRecord]:
    """The records of all ranks; waits a moment for the others if one of them went bad."""
    records = load_records(folder)
    if first_incident(records) is not None:
        time.sleep(GRACE)
    return load_records(folder)


def speaks_for_ranks(records: list[ProcessRecord], watch: Watch) -> bool:
    """Whether this rank reports for all: the one where it began, or rank 0 when all is well."""
    found = first_incident(records)
    if found is None:
        return rank() == 0
    # One that came late may have been missed by another rank, which has spoken then.
    return found[0].pid == watch.pid and is_first(os.path.join(watch.plan.folder, _SPEAKER))


def have_spoken(watch: Watch) -> None:
    """This rank has reported for all."""
    with contextlib.suppress(OSError):
        Path(watch.plan.folder, _SPOKEN).touch()


def wait_for_speaker(records: list[ProcessRecord], watch: Watch) -> None:
    """Wait until another rank has reported: the launcher ends all when the first one ends."""
    found = first_incident(records)
    until = time.monotonic() + _PATIENCE
    while found is not None and found[0].pid != watch.pid and is_running(found[0]):
        if Path(watch.plan.folder, _SPOKEN).exists() or time.monotonic() > until:
            return
        time.sleep(0.05)


def leave_ranks(watch: Watch) -> None:
    """Take this rank's files away; the last one to leave takes the folder.

    One that was stopped or failed leaves its record, from which the others know why they lose it;
    what the others drew stays then, for its capsule.
    """
    if watch.has_stopped or watch.code:
        return
    folder = watch.plan.folder
    own = [f"process-{watch.pid}.json", watch.plan.path]
    if not any(record.stopped for record in load_records(folder)):
        own.append(f"seeds-{watch.key}.json")
    for name in own:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
    with contextlib.suppress(OSError):
        if not any(name.startswith("plan-") for name in os.listdir(folder)):
            shutil.rmtree(folder)


def _remove_stale() -> None:
    """Take away the folders of launchers that are gone; where nobody can say so, none."""
    for path in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), "stayfinite-*-*")):
        launcher = os.path.basename(path).split("-")[1]
        is_gone = os.path.isdir("/proc") and not os.path.exists(f"/proc/{launcher}")
        if launcher.isdigit() and is_gone:
            shutil.rmtree(path, ignore_errors=True)
