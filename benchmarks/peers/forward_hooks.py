"""A forward hook on every module: the first one whose output holds a NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from case_runs import Case, Verdict, is_module

from peers.notes import note
from peers.peer import Answer, Peer, first_note


def attach() -> None:
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )

    running: list[Any] = []
    handles: list[Any] = []

    def enter(module: Any, args: Any) -> None:
        running.append(module)

    def leave(module: Any, args: Any, output: Any) -> None:
        if any(not tensor.isfinite().all() for tensor in _floats(output)):
            root = running[0]
            names = {part: name for name, part in root.named_modules()}
            note(module=names.get(module), root=type(root).__name__)
            for handle in handles:
                handle.remove()
        running.pop()

    handles.append(register_module_forward_pre_hook(enter))
    handles.append(register_module_forward_hook(leave))


def _floats(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _floats(item)
    elif getattr(value, "is_floating_point", bool)():
        yield value


def judge(case: Case, answer: Answer) -> Verdict:
    right = bool(answer) and is_module(case, answer.get("module"), answer.get("root"))
    return {"module": right}


PEER = Peer(name="forward hooks", module="peers.forward_hooks", answer=first_note, judge=judge)
