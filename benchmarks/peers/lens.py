"""TorchLens: every operation of one forward pass of one model.

It has no answer for a training script as such, so its part is done for it: the calls of the
outermost modules are kept, and when the loss or a gradient is bad they are repeated exactly, and
TorchLens is asked for the first non-finite value. It does not see the loss outside of modules,
nor a value that is born in the backward pass, in the optimizer or in the data.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from case_runs import Case, Verdict, is_line

from peers.notes import names_of, note
from peers.peer import Answer, Peer, first_note, is_one_of_its_names, is_same_op

_ANSWER = re.compile(r"in layer (?P<layer>\S+) \(op (?P<op>\S+), module (?P<module>.+?)\),")


class Call(NamedTuple):
    """A call of an outermost module, and all that is needed to repeat it exactly."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    buffers: list[tuple[Any, Any]]
    generator: Any
    autocast: tuple[bool, Any]
    line: int | None

    @contextlib.contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Buffers, generator and autocast as at the time of the call."""
        import torch

        enabled, dtype = self.autocast
        for buffer, value in self.buffers:
            buffer.detach().copy_(value)
        with torch.random.fork_rng(), torch.autocast("cpu", dtype=dtype, enabled=enabled):
            torch.set_rng_state(self.generator)
            yield


class Calls:
    """The calls of outermost modules since the last update."""

    def __init__(self) -> None:
        self.kept: list[Call] = []
        self.depth = 0
        self.is_done = False

    def keep(self, original: Any) -> Any:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.depth and not self.is_done:
                self.kept.append(_taken_down(module, args, kwargs, sys._getframe(1)))
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
        for call in kept:
            try:
                with call.as_it_was():
                    trace = torchlens.trace(call.module, list(call.args), call.kwargs)
                found = _ANSWER.search(trace.first_nonfinite())
            except Exception as error:
                note(failed=repr(error))
                continue
            if found:
                name = re.sub(r":\d+$", "", found["module"]).replace("no module", "")
                note(
                    op=found["op"],
                    module=name,
                    names=names_of(call.module.get_submodule(name)),
                    line=_line(trace, found["layer"]) or call.line,
                )
                return


def _taken_down(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType
) -> Call:
    import torch

    is_script = Path(caller.f_code.co_filename).name == "train.py"

    return Call(
        module=module,
        args=args,
        kwargs=kwargs,
        buffers=[(buffer, buffer.detach().clone()) for buffer in module.buffers()],
        generator=torch.get_rng_state(),
        autocast=(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        line=caller.f_lineno if is_script else None,
    )


def _line(trace: Any, layer: str) -> int | None:
    """The innermost line of the script inside the call; TorchLens lists outer frames first.

    After the frames of the call come those of who asked for the trace: `Calls.trace`.
    """
    operation = next(op for op in trace.ops if op.layer_label == layer)
    inside = itertools.takewhile(lambda frame: not _asks(frame), operation.code_context)
    lines = [frame.line_number for frame in inside if Path(frame.file).name == "train.py"]
    return lines[-1] if lines else None


def _asks(frame: Any) -> bool:
    return frame.file == __file__ and frame.func_name == "trace"


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
    return {
        "line": is_line(case, "train.py", answer.get("line")),
        "op": is_same_op(case, answer.get("op")),
        "module": is_one_of_its_names(case, answer),
    }


PEER = Peer(
    name="TorchLens", module="peers.lens", answer=first_note, judge=judge, package="torchlens"
)
