"""Python processes as forks of one that has imported torch: each saves what the import costs.

For scripts and commands whose subject is not how a process starts. Each test worker has one server,
which begins with the first fork. Runs that `stayfinite` starts by itself in such a process, as the
second run of a script, are forks of the same server.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
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
    ) -> None:
        order = {
            "words": list(words),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
        }
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_server())
        with open(os.devnull, "r+b") as nothing:
            handles = [0, 1, 2]
            for number, given in enumerate((stdin, stdout, stderr)):
                if given == subprocess.DEVNULL:
                    handles[number] = nothing.fileno()
                elif given == subprocess.STDOUT:
                    handles[number] = handles[1]
                elif given is not None:
                    handles[number] = given.fileno()
            socket.send_fds(self._socket, [json.dumps(order).encode() + b"\n"], handles)
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
) -> subprocess.CompletedProcess[bytes]:
    """What `subprocess.run([sys.executable, *words], capture_output=True)` gives."""
    with contextlib.ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write(input)
        given.seek(0)
        process = Fork(words, env=env, cwd=cwd, stdin=given, stdout=out, stderr=err)
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


def command() -> list[str]:
    """What can be typed for `python`: a small process that hands its words to the server."""
    return [sys.executable, "-S", __file__, _server(), "python"]


@functools.cache
def _server() -> str:
    if _own_server:
        return _own_server[0]
    path = os.path.join(tempfile.mkdtemp(), "forks")
    process = subprocess.Popen(
        [sys.executable, __file__, path],
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # so that what a fork prints is buffered, as in a file
    )
    atexit.register(process.kill)
    while not os.path.exists(path):
        assert process.poll() is None, "the server of forks has died"
        time.sleep(0.01)
    return path


def _serve(path: str) -> None:
    _import_what_forks_need()
    _own_server.append(path)
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


def _import_what_forks_need() -> None:
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

    import stayfinite.cli.script_commands
    import stayfinite.guard.replay
    import stayfinite.guard.watch
    import stayfinite.prevent.preflight.rehearsal
    import stayfinite.report.terminal
    import stayfinite.runner.case
    import stayfinite.runner.preflight_run
    import stayfinite.runner.prove
    import stayfinite.runner.run
    import stayfinite.runner.second_run

    torch.set_num_threads(1)
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # torch's own: taking its operators apart takes many seconds
    for module in (stayfinite.runner.case, stayfinite.runner.preflight_run):
        forking = types.SimpleNamespace(**vars(subprocess))
        forking.Popen = _popen
        vars(module)["subprocess"] = forking


def _popen(command: Sequence[str], *, start_new_session: bool = True, **how: Any) -> Fork:
    words = list(command[1:])  # without the interpreter, and flags that are the same for all
    while words[0].startswith("-") and words[0] not in ("-c", "-m"):
        words.pop(0)
    return Fork(words, **how)


def _start(
    connection: socket.socket, listener: socket.socket, running: dict[int, socket.socket]
) -> int:
    data, handles, _, _ = socket.recv_fds(connection, 1 << 20, 3)
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
    for number, handle in enumerate(handles):
        os.dup2(handle, number)
    for handle in handles:
        os.close(handle)
    _run(json.loads(data))
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
        sys.stdout.flush()
        sys.stderr.flush()
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
        trace = error.__traceback__
        sys.excepthook(type(error), error, trace and trace.tb_next)
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


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _serve(sys.argv[1])
    else:
        _own_server.append(sys.argv[1])
        sys.exit(Fork(sys.argv[3:]).wait())
