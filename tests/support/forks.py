"""Python processes as forks of one that has imported torch: each saves what the import costs.

For scripts and commands whose subject is not how a process starts. Each test worker has one server,
which begins with the first fork. What such a process starts by `sys.executable`, be it the second
run of a script, ranks of torchrun or of `mp.spawn`, are forks of the same server. Frameworks, which
take longer than torch, are imported by a server of their own, for forks that ask for it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import stayfinite

SOURCE = str(Path(stayfinite.__file__).resolve().parents[1])
_leave = os._exit  # as it is before a watch makes it tell of the end
_own_server: list[str] = []  # in the server and its forks
_MOST_FILES = 64  # that a process hands to one that it starts


class Fork:
    """What `subprocess.Popen([sys.executable, *words])` is, as far as it is needed here."""

    returncode: int | None = None

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        having: Sequence[str] = (),
        more: Sequence[int] = (),
    ) -> None:
        """`having` are modules that it finds imported, `more` the files that it has open."""
        order = {
            "words": _without_flags(words),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "files": [0, 1, 2, *more],
        }
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_server(tuple(having)))
        with open(os.devnull, "r+b") as nothing:
            handles = [0, 1, 2]
            for number, given in enumerate((stdin, stdout, stderr)):
                if given == subprocess.DEVNULL:
                    handles[number] = nothing.fileno()
                elif given == subprocess.STDOUT:
                    handles[number] = handles[1]
                elif given is not None:
                    handles[number] = given.fileno()
            socket.send_fds(self._socket, [json.dumps(order).encode() + b"\n"], [*handles, *more])
        self.pid = int(self._socket.recv(16))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._socket.settimeout(timeout)
            try:
                self.returncode = int(self._socket.recv(16) or -signal.SIGKILL)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("python", timeout or 0) from None
            self._socket.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(timeout=0)
        return None

    def kill(self) -> None:
        """The server kills whom nobody waits for, and all that it has started."""
        self._socket.close()


def run(
    words: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    input: bytes = b"",
    timeout: float = 300,
    having: Sequence[str] = (),
) -> subprocess.CompletedProcess[bytes]:
    """What `subprocess.run([sys.executable, *words], capture_output=True)` gives."""
    with contextlib.ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write(input)
        given.seek(0)
        process = Fork(words, env=env, cwd=cwd, stdin=given, stdout=out, stderr=err, having=having)
        late: subprocess.TimeoutExpired | None = None
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            late = error
            process.kill()
        out.seek(0)
        err.seek(0)
        if late is not None:
            raise subprocess.TimeoutExpired(list(words), timeout, out.read(), err.read()) from late
        return subprocess.CompletedProcess(list(words), code, out.read(), err.read())


def run_text(words: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """As `run`, with what it printed as text."""
    done = run(words, **how)
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def python(having: Sequence[str] = ()) -> str:
    """The path of what can be typed for `python`: a program that hands its words to the server."""
    return f"{_server(tuple(having))}.python"


@functools.cache
def _server(having: tuple[str, ...] = ()) -> str:
    if _own_server:
        return _own_server[0]
    path = os.path.join(tempfile.mkdtemp(), "forks")
    process = subprocess.Popen(
        [sys.executable, __file__, path, *having],
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # so that what a fork prints is buffered, as in a file
    )
    atexit.register(process.kill)
    while not os.path.exists(path):
        assert process.poll() is None, "the server of forks has died"
        time.sleep(0.01)
    return path


def _serve(path: str, having: Sequence[str]) -> None:
    _import_what_forks_need(having)
    _own_server.append(path)
    here = os.path.dirname(os.path.abspath(__file__))
    code = f"import sys; sys.path[:0] = {[SOURCE, here]}; import forks; forks.stand_in({path!r})"
    program = Path(f"{path}.python")
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", "-c", code])} "$@"\n')
    program.chmod(0o755)
    _hold_all_that_is_started_in_a_sandbox()
    _set_executable(str(program))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)  # now it can be found
    listener.settimeout(0.01)
    running: dict[int, socket.socket] = {}
    gc.collect()
    gc.freeze()  # nothing here belongs to a script
    while os.getppid() != 1:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            pid = _start(connection, listener, running)
            connection.sendall(str(pid).encode())
            connection.setblocking(False)
            running[pid] = connection
        for pid, connection in list(running.items()):
            _look_after(pid, connection, running)


def _import_what_forks_need(having: Sequence[str]) -> None:
    import numpy  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    import torch.distributions
    import torch.nn.parallel
    import torch.utils.checkpoint
    import torch.utils.data

    import stayfinite.capsule.make
    import stayfinite.cli.script_commands
    import stayfinite.guard.discover
    import stayfinite.guard.loop_replay
    import stayfinite.guard.loop_trials
    import stayfinite.guard.read_values
    import stayfinite.guard.replay
    import stayfinite.guard.watch
    import stayfinite.prevent.preflight.rehearsal
    import stayfinite.report.terminal
    import stayfinite.runner.case
    import stayfinite.runner.preflight_run
    import stayfinite.runner.prove
    import stayfinite.runner.run
    import stayfinite.runner.second_run

    for name in having:
        importlib.import_module(name)
    torch.set_num_threads(1)
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # torch's own: taking its operators apart takes many seconds
    _keep_process_groups()
    for module in (stayfinite.runner.case, stayfinite.runner.preflight_run):
        forking = types.SimpleNamespace(**vars(subprocess))
        forking.Popen = _popen
        vars(module)["subprocess"] = forking


def _keep_process_groups() -> None:
    """Let none be destroyed before the process ends.

    When the last that has one goes, often the Reducer of a DDP model, torch joins the threads of
    gloo without giving the GIL away, and a thread that is about to free a tensor waits for the
    GIL: about one run in ten of a plain script never ended on a busy machine.
    """
    from torch.distributed import distributed_c10d

    make, kept = distributed_c10d._new_process_group_helper, []

    def make_and_keep(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        kept.append(made)
        return made

    distributed_c10d._new_process_group_helper = make_and_keep


def _set_executable(path: str) -> None:
    sys.executable = path
    multiprocessing.set_executable(path)


def _hold_all_that_is_started_in_a_sandbox() -> None:
    """The server is outside of it, so from then on processes are started as usual."""
    from stayfinite.runner import sandbox

    theirs, python = sandbox.enter, sys.executable

    def enter(*args: Any, **options: Any) -> Any:
        kind = theirs(*args, **options)
        _set_executable(python)
        return kind

    sandbox.enter = enter


def _popen(command: Sequence[str], *, start_new_session: bool = True, **how: Any) -> Fork:
    return Fork(command[1:], **how)  # without the interpreter


def _without_flags(words: Sequence[str]) -> list[str]:
    """What comes after the flags of the interpreter, which are the same for all forks."""
    left = list(words)
    while left[0].startswith("-") and left[0] not in ("-c", "-m"):
        left.pop(0)
    return left


def _start(
    connection: socket.socket, listener: socket.socket, running: dict[int, socket.socket]
) -> int:
    data, handles, _, _ = socket.recv_fds(connection, 1 << 20, _MOST_FILES)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 20)
    pid = os.fork()
    if pid:
        for handle in handles:
            os.close(handle)
        return pid
    for each in (listener, connection, *running.values()):
        each.close()
    os.setsid()
    order = json.loads(data)
    apart = [fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, 2 * _MOST_FILES) for handle in handles]
    for handle in handles:
        os.close(handle)
    for number, handle in zip(order["files"], apart, strict=True):
        os.dup2(handle, number)
        os.close(handle)
    _run(order)
    raise AssertionError("a fork has left by now")


def _run(order: dict[str, Any]) -> None:
    """Be a process with this environment, in this folder, and leave as one."""
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(order["env"].get("PYTHONDONTWRITEBYTECODE"))
    if order["env"].get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    code = 1
    try:
        code = _code_of(order["words"])
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        # Nothing is destroyed: that would take longer than the run, and a process group may wait
        # there for ever, for a thread of its own that wants the lock which the main thread has.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, OSError):  # the script may have closed it
                stream.flush()
        _leave(code)


def _code_of(words: list[str]) -> int:
    """Run what these words after `python` name as the true `__main__`; the result is its code."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        elif words[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            exec(compile(words[1], "<string>", "exec"), vars(main))
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(os.path.realpath(words[0]))
            main.__file__ = path = os.path.join(os.getcwd(), words[0])
            exec(compile(Path(path).read_bytes(), path, "exec"), vars(main))
        return 0
    except SystemExit as ended:
        if isinstance(ended.code, int) or ended.code is None:
            return ended.code or 0
        print(ended.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 1


def _look_after(pid: int, connection: socket.socket, running: dict[int, socket.socket]) -> None:
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        with contextlib.suppress(OSError):
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    else:
        try:
            if connection.recv(1):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        with contextlib.suppress(ProcessLookupError):  # nobody waits for it any more
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    connection.close()
    del running[pid]


def stand_in(server: str) -> None:
    """Be the process that the words after `python` start, for those who wait or send signals."""
    _own_server.append(server)
    files = [number for number in range(3, _MOST_FILES) if _is_open(number)]
    fork = Fork(sys.argv[1:], more=files)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(fork.pid, number))
    code = fork.wait()
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _is_open(number: int) -> bool:
    try:
        return bool(os.fstat(number))
    except OSError:
        return False


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
