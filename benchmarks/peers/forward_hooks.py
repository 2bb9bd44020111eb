"""A forward hook on every module: the first one whose output holds a NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from case_runs import Case, Verdict

from peers.notes import names_of, note
from peers.peer import Answer, Peer, first_note, is_one_of_its_names


def attach() -> None:
    from torch.nn.modules.module import register_module_forward_hook

    def leave(module: Any, args: Any, output: Any) -> None:
        if any(not tensor.isfinite().all() for tensor in _floats(output)):
            names = names_of(module)
            note(names=names, module=max((name for name, _ in names), key=len))
            handle.remove()

    handle = register_module_forward_hook(leave)


def _floats(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _floats(item)
    elif getattr(value, "is_floating_point", bool)():
        yield value


def judge(case: Case, answer: Answer) -> Verdict:
    return {"module": is_one_of_its_names(case, answer)}


PEER = Peer(name="forward hooks", module="peers.forward_hooks", answer=first_note, judge=judge)
