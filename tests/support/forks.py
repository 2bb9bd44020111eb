"""Scripts run by forks of one process that has imported torch: each saves what the import costs.

For scripts whose subject is not how a process starts. Each test worker has one server, which begins
with the first fork.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import stayfinite

SOURCE = str(Path(stayfinite.__file__).resolve().parents[1])


class Fork:
    """A script that runs until `wait`, after which `output` has what it printed."""

    output = ""

    def __init__(self, script: Sequence[str], *, env: Mapping[str, str], cwd: Path | None) -> None:
        handle, self._path = tempfile.mkstemp()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_server())
        order = {"argv": list(script), "env": dict(env), "cwd": str(cwd or Path.cwd())}
        socket.send_fds(self._socket, [json.dumps(order).encode()], [handle])
        os.close(handle)

    def wait(self, timeout: float) -> int:
        """The exit code; after `timeout` seconds it is killed."""
        self._socket.settimeout(timeout)
        try:
            return int(self._socket.recv(16) or -signal.SIGKILL)
        except TimeoutError:
            return -signal.SIGKILL
        finally:
            self._socket.close()  # the server kills whom nobody waits for
            self.output = Path(self._path).read_text(errors="replace")
            os.unlink(self._path)


@functools.cache
def _server() -> str:
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "forks")
    process = subprocess.Popen(
        [sys.executable, __file__, path], env={**os.environ, "PYTHONPATH": SOURCE}
    )
    atexit.register(process.kill)
    while not os.path.exists(path):
        assert process.poll() is None, "the server of forks has died"
        time.sleep(0.01)
    return path


def _serve(path: str) -> None:
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.nn.parallel

    import stayfinite.guard.watch  # noqa: F401

    torch.set_num_threads(1)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)  # now it can be found
    listener.settimeout(0.01)
    running: dict[int, socket.socket] = {}
    while os.getppid() != 1:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            pid = _start(connection, listener)
            connection.setblocking(False)
            running[pid] = connection
        for pid, connection in list(running.items()):
            _look_after(pid, connection, running)


def _start(connection: socket.socket, listener: socket.socket) -> int:
    data, handles, _, _ = socket.recv_fds(connection, 1 << 20, 1)
    pid = os.fork()
    if pid:
        os.close(handles[0])
        return pid
    listener.close()
    connection.close()
    os.setsid()
    os.dup2(handles[0], 1)
    os.dup2(handles[0], 2)
    os._exit(_run(json.loads(data)))


def _run(order: dict[str, Any]) -> int:
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.argv = order["argv"]
    sys.path[:0] = [os.path.dirname(os.path.abspath(sys.argv[0]))]
    try:
        # Nothing is destroyed at the end, unlike after runpy: a process group may wait there for
        # ever, for a thread of its own that wants the lock which the main thread has.
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = sys.argv[0]
        exec(compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec"), vars(main))
        return 0
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


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
    _serve(sys.argv[1])
