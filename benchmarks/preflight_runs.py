"""Many preflights from one process that has imported torch once.

    python benchmarks/preflight_runs.py FOLDER SCRIPT...

Each script gets a forked child, which runs the real command in an empty folder; what it found is
written to FOLDER, in a file named for the number of the script.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT = 120


@dataclass(frozen=True, kw_only=True)
class Flight:
    """One preflight: its exit code, what it wrote as JSON, and what it said."""

    code: int
    risks: list[dict[str, Any]]
    err: str
    seconds: float

    @property
    def warnings(self) -> list[dict[str, Any]]:
        return [risk for risk in self.risks if risk["level"] != "low"]


def preflights(scripts: Sequence[Path]) -> list[Flight]:
    """A preflight of each script, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        names = [str(script.resolve()) for script in scripts]
        source = str(Path(__file__).resolve().parents[1] / "src")
        environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, __file__, folder, *names],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return [_flight(Path(folder), number) for number in range(len(scripts))]


def _flight(folder: Path, number: int) -> Flight:
    told = json.loads((folder / f"{number}.json").read_text())
    found = folder / f"{number}-risks.json"
    data = json.loads(found.read_text()) if found.exists() else {"risks": []}
    return Flight(risks=data["risks"], **told)


def _serve(folder: Path, scripts: list[str]) -> None:
    import torch
    import torch._dynamo
    import torch.distributions
    import torch.utils.checkpoint
    import torch.utils.data

    import stayfinite.prevent.preflight.rehearsal  # noqa: F401

    torch.set_num_threads(1)
    for number, script in enumerate(scripts):
        start = time.perf_counter()
        with open(folder / f"{number}.err", "w") as err:
            pid = os.fork()
            if pid == 0:
                _fly(folder / f"{number}-risks.json", script, err.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        told = {
            "code": code,
            "err": (folder / f"{number}.err").read_text(),
            "seconds": time.perf_counter() - start,
        }
        (folder / f"{number}.json").write_text(json.dumps(told))


def _fly(found: Path, script: str, err: int) -> None:
    """In the child: the command, as if it had been typed."""
    os.dup2(err, 2)
    signal.alarm(TIMEOUT)
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        sys.argv = ["stayfinite", "preflight", "--json", str(found), script]
        code = 1
        try:
            from stayfinite.cli import main

            main(sys.argv[1:])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        finally:
            os.chdir("/")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2:])
