"""torch's anomaly mode: it names an autograd node and the stack of its forward, on stderr."""

from __future__ import annotations

import re

from case_runs import Case, Finished, Verdict, is_line

from peers.peer import Answer, Peer, is_same_op

_ERROR = re.compile(r"Function '(\w+)' returned nan values")
_FORWARD = "Traceback of forward call that caused the error:"


def attach() -> None:
    import torch

    torch.autograd.set_detect_anomaly(True)


def answer(case: Case, finished: Finished, notes: list[Answer]) -> Answer | None:
    error = _ERROR.search(finished.err)
    if error is None:
        return None
    forward = finished.err.partition(_FORWARD)[2].partition("(Triggered internally")[0]
    script = re.escape(str((case.folder / "train.py").resolve()))
    lines = re.findall(rf'File "{script}", line (\d+)', forward)
    return {"op": error[1], "line": int(lines[-1]) if lines else None}


def judge(case: Case, answer: Answer) -> Verdict:
    line = answer.get("line")
    return {"line": is_line(case, "train.py", line), "op": is_same_op(case, answer.get("op"))}


PEER = Peer(name="anomaly mode", module="peers.anomaly", answer=answer, judge=judge)
