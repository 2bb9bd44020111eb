"""Scripts run in real processes, by plain python and by `stayfinite run`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import stayfinite

SOURCE = str(Path(stayfinite.__file__).resolve().parents[1])
PREFIX = b"stayfinite: "

# Imports torch and most of us once, and is forked for each run. For claims about what a run says
# and does, not about its beginning: there torch must come with the script.
WARM = """
import gc, json, os, sys, tempfile
import torch, torch._dynamo
import stayfinite.cli, stayfinite.guard.replay, stayfinite.report.terminal, stayfinite.runner.run

leave = os._exit  # as it is before a watch wraps it
gc.freeze()  # nothing here belongs to a script
for line in sys.stdin:
    job, child = json.loads(line), os.fork()
    if child == 0:
        for number, (path, flags) in enumerate(job["files"]):
            os.dup2(os.open(path, flags), number)
        sys.stdin = sys.__stdin__ = open(0, closefd=False)
        os.chdir(job["folder"])
        os.environ.update(job["env"])
        tempfile.tempdir = None
        sys.argv[1:] = job["words"]
        exec(job["first"])
        try:
            stayfinite.cli.main(prog_name="stayfinite")
        except SystemExit as end:
            sys.stdout.flush()
            leave(end.code)  # to take torch apart would take longer than the run
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Finished:
    code: int
    out: bytes
    err: bytes

    @property
    def ours(self) -> list[str]:
        """Our lines on stderr, without their prefix, and without the one about the record."""
        lines = [line for line in self.err.splitlines() if line.startswith(PREFIX)]
        said = [line.removeprefix(PREFIX).decode() for line in lines]
        return [line for line in said if not line.startswith("recorded in ")]

    @property
    def seen(self) -> tuple[int, bytes, bytes]:
        """What the outside sees of the script itself: our lines are left out."""
        lines = self.err.splitlines(keepends=True)
        return self.code, self.out, b"".join(x for x in lines if not x.startswith(PREFIX))


class Scripts:
    """A working folder beside, not inside, the temporary folder of the processes."""

    def __init__(self, root: Path, server: subprocess.Popen[str]) -> None:
        self._server = server
        self.source = SOURCE
        self.folder = root / "project"
        # Short, because the path of a socket may not be long.
        self.temporary = Path(tempfile.mkdtemp(prefix="sf-", dir="/tmp"))
        self.folder.mkdir()

    def write(self, source: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    def plain(self, *words: str, **how: Any) -> Finished:
        return self._start([sys.executable, *words], **how)

    def watched(self, *words: str, options: Sequence[str] = (), **how: Any) -> Finished:
        return self._start(
            [sys.executable, "-m", "stayfinite", "run", "--prove", "0", *options, *words], **how
        )

    def warm(
        self,
        *words: str,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        first: str = "",
    ) -> Finished:
        """As `watched`, in a process that has torch already; it runs the code `first`."""
        out, err = self.temporary / "out", self.temporary / "err"
        written = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        job = {
            "files": [("/dev/null", os.O_RDONLY), (str(out), written), (str(err), written)],
            "folder": str(self.folder),
            "env": {
                "TMPDIR": str(self.temporary),
                "PYTHONDONTWRITEBYTECODE": "1",
                **(env or {}),
            },
            "words": ["run", "--prove", "0", *options, *words],
            "first": first,
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(job), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        return Finished(code=code, out=out.read_bytes(), err=err.read_bytes())

    def result(self, name: str = "out.json") -> Any:
        return json.loads((self.folder / name).read_text())

    def _start(
        self, command: list[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Finished:
        settings = {"PYTHONPATH": SOURCE, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **settings, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
            input=stdin,
            capture_output=True,
            timeout=120,
        )
        return Finished(code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WARM], env=env, text=True, **pipes) as process:
        yield process
        process.kill()


@pytest.fixture
def scripts(tmp_path: Path, server: subprocess.Popen[str]) -> Iterator[Scripts]:
    made = Scripts(tmp_path, server)
    yield made
    shutil.rmtree(made.temporary, ignore_errors=True)
