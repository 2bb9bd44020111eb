"""inject(): one value of a training goes bad, at a chosen step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from stayfinite.errors import ConfigError, InputError
from stayfinite.testing.fault import Aim, Fault
from stayfinite.testing.harm import Harm, Value
from stayfinite.testing.moment import Again, Attempts, watch_calls
from stayfinite.testing.targets import attach


@contextlib.contextmanager
def inject(
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    op: str | None = None,
    node: str | None = None,
    module: str | None = None,
    gradient: str | None = None,
    loss: bool = False,
    inputs: bool | str = False,
    batch: bool | str = False,
    parameter: str | None = None,
    state: str | None = None,
    value: Value = "nan",
    at_step: int = 0,
    persistent: bool = False,
    element: int | None = None,
    bit: int | None = None,
    seed: int = 0,
    rank: int | None = None,
    must_fire: bool = True,
) -> Iterator[Fault]:
    """Make one value go bad inside the block, at a chosen step.

    Give exactly one of these:

    - `op`: the result of an operator, such as "softmax" or "aten.log"; forward or backward
    - `node`: the gradients that come out of an autograd node, such as "SoftmaxBackward0"
    - `module`: the output of a module, by its name in the model; "" is the model
    - `gradient`: a parameter's gradient as the backward pass delivers it
    - `loss`: the number that a backward pass starts from, and its gradient
    - `inputs`: what the model is called with; True, or the path of a tensor such as "0" or "mask"
    - `batch`: what `fault.batches(loader)` delivers; True, or a path
    - `parameter`: a parameter, in place, when the model is first called in the step
    - `state`: what the optimizer keeps, such as "0.weight.exp_avg", just before the update

    Steps are attempted updates since the block began, of `optimizer` if it is given, counted
    from 0; vetoed ones and those skipped by a GradScaler count. The fault strikes once, so that
    a retry is clean; if `persistent`, also whenever the same step is run again (the model has
    the same weights and gets the same inputs). The element is `element`, counted flat, or one
    that `seed` chooses. With `rank`, it strikes only there. A fault that never struck is an
    error at the end of the block, unless `must_fire` is False.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with inject(model, optimizer, gradient="weight", at_step=1, element=0) as fault:
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(1, 2)).sum().backward()
    ...         optimizer.step()
    >>> fault.hits[0].step, fault.hits[0].location
    (1, 'gradients.weight')
    """
    wanted = {
        "op": op,
        "node": node,
        "module": module,
        "gradient": gradient,
        "loss": loss or None,
        "inputs": inputs if inputs is not False else None,
        "batch": batch if batch is not False else None,
        "parameter": parameter,
        "state": state,
    }
    aim = _only_one(wanted)
    _check(model, aim, at_step=at_step, persistent=persistent)
    attempts, again = Attempts(optimizer), Again() if persistent else None
    harm = Harm(value=value, element=element, bit=bit, seed=seed)
    fault = Fault(aim, harm, attempts, at_step=at_step, again=again, rank=rank)
    with contextlib.ExitStack() as attached:
        attached.enter_context(attempts.attach())
        if again is not None and model is not None and aim.option != "batch":
            attached.enter_context(watch_calls(model, again))
        attached.enter_context(attach(fault, model, optimizer))
        yield fault
    if must_fire and not fault.fired and fault.is_here:
        raise fault.never_fired()


def _only_one(wanted: dict[str, Any]) -> Aim:
    given = {option: name for option, name in wanted.items() if name is not None}
    if len(given) != 1:
        raise ConfigError(
            f"inject() needs exactly one of {', '.join(wanted)}; it got "
            f"{', '.join(given) or 'none of them'}. Several faults are nested inject() blocks."
        )
    ((option, name),) = given.items()
    return Aim(option=option, name=None if name is True else name)


def _check(model: nn.Module | None, aim: Aim, *, at_step: int, persistent: bool) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; it must be a torch.nn.Module.")
    if at_step < 0:
        raise ConfigError(f"at_step is {at_step}; it must be at least 0, which is the first step.")
    if persistent and model is None and aim.option != "batch":
        raise ConfigError("persistent=True needs the model, to know the step again.")
