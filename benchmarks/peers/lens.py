"""TorchLens: every operation of one forward pass of one model.

It has no answer for a training script as such, so its part is done for it: the calls of the
outermost modules are kept, and when the loss or a gradient is bad they are traced again, and
TorchLens is asked for the first non-finite value. It does not see the loss outside of modules,
nor a value that is born in the backward pass, in the optimizer or in the data.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from case_runs import Case, Verdict, is_line, is_module

from peers.notes import note
from peers.peer import Answer, Peer, first_note, is_same_op

_ANSWER = re.compile(r"in layer (?P<layer>\S+) \(op (?P<op>\S+), module (?P<module>.+?)\),")


class Calls:
    """The calls of outermost modules since the last update."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.depth = 0
        self.is_done = False

    def keep(self, original: Any) -> Any:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.depth and not self.is_done:
                self.kept.append((module, args, kwargs))
            self.depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                self.depth -= 1

        return call

    def trace(self) -> None:
        """Ask TorchLens about each call, and write down its first answer."""
        import torchlens

        self.is_done = True
        kept, self.kept = self.kept, []
        for module, args, kwargs in kept:
            try:
                trace = torchlens.trace(module, list(args), kwargs)
                found = _ANSWER.search(trace.first_nonfinite())
            except Exception as error:
                note(failed=repr(error))
                continue
            if found:
                name = re.sub(r":\d+$", "", found["module"])
                note(
                    op=found["op"],
                    module="" if name == "no module" else name,
                    root=type(module).__name__,
                    line=_line(trace, found["layer"]),
                )
                return


def _line(trace: Any, layer: str) -> int | None:
    """The innermost line of the script in what TorchLens kept of the stack."""
    operation = next(op for op in trace.ops if op.layer_label == layer)
    frames = ((Path(frame.file).name, frame.line_number) for frame in operation.code_context)
    return next((line for file, line in frames if file == "train.py"), None)


def attach() -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    calls = Calls()
    torch.nn.Module.__call__ = calls.keep(torch.nn.Module.__call__)
    backward = torch.Tensor.backward

    def watched(root: Any, *args: Any, **kwargs: Any) -> None:
        if not calls.is_done and not root.isfinite().all():
            calls.trace()
        backward(root, *args, **kwargs)

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        bad = any(p.grad is not None and not p.grad.isfinite().all() for p in params)
        if bad and not calls.is_done:
            calls.trace()
        calls.kept.clear()

    torch.Tensor.backward = watched
    register_optimizer_step_pre_hook(before_step)


def judge(case: Case, answer: Answer) -> Verdict:
    right = bool(answer) and is_module(case, answer.get("module"), answer.get("root"))
    return {
        "line": is_line(case, "train.py", answer.get("line")),
        "op": is_same_op(case, answer.get("op")),
        "module": right,
    }


PEER = Peer(
    name="TorchLens", module="peers.lens", answer=first_note, judge=judge, package="torchlens"
)
