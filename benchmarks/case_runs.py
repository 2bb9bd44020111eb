"""Cases (a script and its truth), their runs in processes of their own, and the judgement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stayfinite

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "cases"
SOURCE = str(Path(stayfinite.__file__).resolve().parents[1])
ASPECTS = ("found", "line", "op", "module", "cause", "step", "rank")
STEPS_OFF = 2  # the script's own counter may start elsewhere
Verdict = dict[str, bool | None]  # None: not scored


@dataclass(frozen=True, kw_only=True)
class Case:
    """A folder with train.py, train_fixed.py and truth.json."""

    folder: Path
    truth: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_benign(self) -> bool:
        return bool(self.truth.get("benign"))


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One process that ran a script; the exit code is None when it was ended for taking too long.

    `result` is the JSON that it wrote, None if it wrote none. `changed` are the files that are not
    as they were, beside the script and in its working folder, less our own record.
    """

    code: int | None
    result: Any
    out: bytes
    err: str
    seconds: float
    changed: tuple[str, ...] = ()

    @property
    def incidents(self) -> list[dict[str, Any]]:
        return list(self.result["incidents"]) if self.result else []


def cases_in(folders: Iterable[Path]) -> list[Case]:
    """All cases of these folders; a folder may also be a case itself."""
    found = sorted(path.parent for folder in folders for path in _truths(folder))
    return [
        Case(folder=folder, truth=json.loads((folder / "truth.json").read_text()))
        for folder in found
    ]


def _truths(folder: Path) -> list[Path]:
    own = folder / "truth.json"
    return [own] if own.exists() else list(folder.glob("*/truth.json"))


def run_watched(script: Path, *, timeout: float = 300) -> Finished:
    """The script under `stayfinite run --json`, in an empty folder."""
    before = ("-m", "stayfinite", "run", "--json")
    return run_python(before, script, env={"PYTHONPATH": SOURCE}, timeout=timeout)


def run_plain(script: Path, *, timeout: float = 300) -> Finished:
    """The script by plain python, in an empty folder."""
    return run_python((), script, env={}, timeout=timeout)


def run_python(
    before: Sequence[str], script: Path, *, env: Mapping[str, str], timeout: float
) -> Finished:
    """`python *before RESULT script` in an empty folder; without `before`, only the script."""
    with tempfile.TemporaryDirectory() as folder:
        work, result = Path(folder, "work"), Path(folder, "result.json")
        work.mkdir()
        words = [*before, str(result)] if before else []
        known = _contents(script.parent, work)
        start = time.perf_counter()
        code, out, err = _finish(
            [*words, str(script.resolve())],
            cwd=work,
            env={**os.environ, **env},
            timeout=timeout,
        )
        return Finished(
            code=code,
            result=json.loads(result.read_text()) if result.exists() else None,
            out=out,
            err=err.decode(errors="replace"),
            seconds=time.perf_counter() - start,
            changed=tuple(sorted(dict(known.items() ^ _contents(script.parent, work).items()))),
        )


def _contents(*folders: Path) -> dict[str, bytes]:
    ours = ("__pycache__", "stayfinite-runs")
    return {
        str(path): path.read_bytes()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not any(part in ours for part in path.parts)
    }


def start_python(words: list[str], **how: Any) -> subprocess.CompletedProcess[bytes]:
    """Run python to its end; the tests put something quicker in its place."""
    return subprocess.run([sys.executable, *words], capture_output=True, **how)


def _finish(words: list[str], **how: Any) -> tuple[int | None, bytes, bytes]:
    try:
        done = start_python(words, **how)
    except subprocess.TimeoutExpired as late:
        return None, late.stdout or b"", late.stderr or b""
    return done.returncode, done.stdout, done.stderr


def judge(case: Case, incidents: Sequence[Mapping[str, Any]]) -> Verdict:
    """The first incident against the truth; of a benign case only `found`: there is none."""
    if case.is_benign:
        return {**dict.fromkeys(ASPECTS), "found": not incidents}
    incident = incidents[0] if incidents else {}
    origin = incident.get("origin") or {}
    truth, answered = case.truth, bool(incidents)
    diagnosis = incident.get("diagnosis") or {}
    return {
        "found": answered,
        "line": is_line(case, origin.get("file"), origin.get("line")),
        "op": is_op(case, origin.get("op"), origin.get("node")),
        "module": bool(origin) and is_module(case, origin.get("module"), origin.get("root")),
        "cause": diagnosis.get("cause") in accepted(truth, "cause"),
        "step": answered and abs(incident["step"] - truth["first_bad_step"]) <= STEPS_OFF,
        "rank": (answered and incident["rank"] == truth["rank"]) if "rank" in truth else None,
    }


def accepted(truth: Mapping[str, Any], key: str) -> list[Any]:
    """All right answers."""
    return [truth[key], *truth.get(f"{key}_alt", ())]


def is_line(case: Case, file: str | None, line: int | None) -> bool:
    """Whether this line of the script is the guilty one."""
    return file == case.truth.get("file", "train.py") and line in accepted(case.truth, "line")


def is_op(case: Case, *names: str | None) -> bool | None:
    """Whether one of the names is the guilty operation; None where the truth has none."""
    if case.truth["op"] is None:
        return None
    right = {without_namespace(op) for op in accepted(case.truth, "op") if op}
    return any(name is not None and without_namespace(name) in right for name in names)


def is_module(case: Case, module: str | None, root: str | None) -> bool:
    """Whether this module is the innermost one; names within the root or with it are both right."""
    answers: set[str | None] = {module}
    if module is not None and root is not None:
        answers.add(f"{root}.{module}" if module else root)
    return bool(answers & set(accepted(case.truth, "module")))


def without_namespace(op: str) -> str:
    """aten.log.default and prims::log.default are log.default; LogBackward0 is itself."""
    parts = op.replace("::", ".").split(".")
    return ".".join(parts[-2:]) if len(parts) > 2 and parts[0] != "torch" else parts[-1]
