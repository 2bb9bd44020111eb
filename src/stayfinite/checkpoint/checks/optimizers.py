"""Whether the saved state of an optimizer belongs to the one that shall get it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from stayfinite.checkpoint.checks.dtypes import is_narrower, name_of
from stayfinite.checkpoint.checks.sanity import SECOND_MOMENTS
from stayfinite.checkpoint.format.contents import OptimizerRecord
from stayfinite.checkpoint.format.held import Held, leaves
from stayfinite.checkpoint.problems import Problem

# State that has one number for each number of the parameter.
_SHAPED = SECOND_MOMENTS - {"sum"} | {"exp_avg", "momentum_buffer", "grad_avg", "prev", "step_size"}


def optimizer_problems(
    record: OptimizerRecord, optimizer: Optimizer, names: Sequence[str | None], part: str
) -> Iterator[Problem]:
    """Everything that does not fit; `names` are those of the optimizer's parameters."""
    if record.class_name not in (None, type(optimizer).__name__):
        message = f"was saved from {record.class_name} and would go to {type(optimizer).__name__}."
        yield Problem(kind="optimizer", key=part, message=message)
    saved = [len(group.get("params", ())) for group in record.state_dict["param_groups"]]
    present = [len(group["params"]) for group in optimizer.param_groups]
    if saved != present:
        message = f"has groups of {saved} parameters, and the optimizer has {present}."
        yield Problem(kind="optimizer", key=f"{part}.param_groups", message=message)
        return
    yield from _name_problems(record, names, part)
    yield from _state_problems(record, optimizer, names, part)


def _name_problems(
    record: OptimizerRecord, names: Sequence[str | None], part: str
) -> Iterator[Problem]:
    """torch matches by order alone, so state can end up with another parameter."""
    for number, (saved, present) in enumerate(zip(record.names or (), names, strict=False)):
        if saved is not None and present is not None and saved != present:
            message = f"was that of {saved}, and would go to {present}: the order has changed."
            yield Problem(kind="optimizer", key=f"{part}.state.{number}", message=message)


def _state_problems(
    record: OptimizerRecord, optimizer: Optimizer, names: Sequence[str | None], part: str
) -> Iterator[Problem]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids = [number for group in record.state_dict["param_groups"] for number in group["params"]]
    narrow: list[tuple[str, Held, Any]] = []
    for place, (number, param) in enumerate(zip(ids, params, strict=True)):
        state = record.state_dict.get("state", {}).get(number)
        for name, value in state.items() if isinstance(state, dict) else ():
            key = f"{part}.state.{names[place] or place}.{name}"
            for held in leaves(value):
                if name in _SHAPED and held.shape != tuple(param.shape):
                    yield _misshaped(key, held, param)
                if name != "step" and is_narrower(held.dtype, param.dtype):
                    narrow.append((key, held, param))
    if narrow:
        yield _narrowed(narrow)


def _misshaped(key: str, held: Held, param: Any) -> Problem:
    message = f"has shape {list(held.shape)}, and its parameter {list(param.shape)}."
    return Problem(kind="shape", key=key, message=message)


def _narrowed(narrow: list[tuple[str, Held, Any]]) -> Problem:
    key, held, param = narrow[0]
    others = f"and {len(narrow) - 1} more were" if len(narrow) > 1 else "was"
    message = (
        f"{others} saved as {name_of(held.dtype)} for a {name_of(param.dtype)} parameter: small "
        "squares of gradients become 0, and the next update divides by eps alone. Save optimizer "
        "state as it is, or leave it out and warm up again."
    )
    return Problem(kind="narrowed", key=key, message=message)
