"""What a peer is: something switched on in every process of a script, and a reader of its words."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from case_runs import (
    SOURCE,
    Case,
    Finished,
    Verdict,
    accepted,
    is_module,
    run_python,
    without_namespace,
)

# A function of torch and the operations that do its work.
PARTS = {
    "linear": {"mm", "addmm", "linear"},
    "matmul": {"mm", "bmm", "matmul"},
    "conv2d": {"convolution"},
    "truediv": {"div"},
}
HERE = Path(__file__).resolve().parent
Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """`answer` reads what was found, None if nothing; `judge` says what of it is right."""

    name: str
    module: str
    answer: Callable[[Case, Finished, list[Answer]], Answer | None]
    judge: Callable[[Case, Answer], Verdict]
    package: str = "torch"

    def missing(self) -> str:
        """What to type when it cannot run here, else an empty string."""
        return "" if importlib.util.find_spec(self.package) else f"pip install {self.package}"

    def run(self, case: Case, timeout: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder, "notes.jsonl")
            env = {
                "PYTHONPATH": os.pathsep.join((str(HERE / "attach"), str(HERE.parent), SOURCE)),
                "NONFINITE_PEER": self.module,
                "NONFINITE_NOTES": str(notes),
                "TORCHDYNAMO_DISABLE": "1",
            }
            finished = run_python((), case.folder / "train.py", env=env, timeout=timeout)
            lines = notes.read_text().splitlines() if notes.exists() else []
        found = [json.loads(line) for line in lines]
        if not any(note.get("is_attached") for note in found):  # else it would seem to find nothing
            raise RuntimeError(f"{self.name} was not switched on:\n{finished.err[-2000:]}")
        answers = [n for n in found if "is_attached" not in n and "failed" not in n]
        answer = self.answer(case, finished, answers)
        if case.is_benign:
            verdict: Verdict = {"found": answer is None}
        else:
            verdict = {"found": answer is not None, **self.judge(case, answer or {})}
        return {
            "verdict": verdict,
            "answer": answer or {},
            "failed": [n["failed"] for n in found if "failed" in n],
            "code": finished.code,
            "seconds": round(finished.seconds, 1),
        }


def first_note(case: Case, finished: Finished, notes: list[Answer]) -> Answer | None:
    """The earliest of what the processes wrote down."""
    return min(notes, key=lambda note: note["time"], default=None)


def is_one_of_its_names(case: Case, answer: Answer) -> bool:
    """Whether any name of the module that was found is a right one."""
    return any(is_module(case, name, root) for name, root in answer.get("names", ()))


def is_same_op(case: Case, name: str | None) -> bool | None:
    """Whether a node or function belongs to the guilty operation, however it is spelled."""
    if case.truth["op"] is None:
        return None
    right = {bare(op) for op in accepted(case.truth, "op") if op}
    return name is not None and bool(PARTS.get(bare(name), {bare(name)}) & right)


def bare(op: str) -> str:
    """log of aten.log.default, LogBackward0, log_ and torch.log."""
    words = op.split(".")
    short = without_namespace(op).split(".")[0] if words[0] == "aten" else words[-1]
    short = re.sub(r"Backward\d*$", "", short).replace("_", "").lower()
    return re.sub(r"(?<=.)(forward|backward)$", "", short)
