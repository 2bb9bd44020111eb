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

import forks
import pytest
from forks import SOURCE

PREFIX = b"stayfinite: "


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

    def __init__(self, root: Path) -> None:
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

    def alone(self, *words: str, **how: Any) -> Finished:
        """As `plain`, in a process that has torch already."""
        return self._fork(words, **how)

    def warm(
        self,
        *words: str,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        first: str = "",
    ) -> Finished:
        """As `watched`, in a process that has torch already; it runs the code `first`.

        For claims about what a run says and does, not about its beginning: there torch must come
        with the script.
        """
        code = f"{first}\nfrom stayfinite.cli import main\nmain(prog_name='stayfinite')"
        return self._fork(["-c", code, "run", "--prove", "0", *options, *words], env=env)

    def _fork(self, words: Sequence[str], *, env: Mapping[str, str] | None = None) -> Finished:
        done = forks.run(words, cwd=self.folder, env=self._environment(env), timeout=120)
        return Finished(code=done.returncode, out=done.stdout, err=done.stderr)

    def result(self, name: str = "out.json") -> Any:
        return json.loads((self.folder / name).read_text())

    def _start(
        self, command: list[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> Finished:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment(env),
            input=stdin,
            capture_output=True,
            timeout=120,
        )
        return Finished(code=done.returncode, out=done.stdout, err=done.stderr)

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        settings = {"PYTHONPATH": SOURCE, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **settings, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    made = Scripts(tmp_path)
    yield made
    shutil.rmtree(made.temporary, ignore_errors=True)
