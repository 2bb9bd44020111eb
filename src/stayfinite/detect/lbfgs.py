"""Taking back a step of LBFGS, the one optimizer that hidden gradients do not stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stayfinite.detect.gradients import params_of
from stayfinite.detect.scan import all_finite


class LBFGSCopy:
    """Parameters and state of an LBFGS, which moves through several points within one step.

    A line search may look at a point that is not finite and turn back, so what counts is
    the first gradient and the point where it ends.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._params = [(p, p.detach().clone()) for p in params_of(optimizer)]
        self._states = {p: _copy_state(s) for p, s in optimizer.state.items()}
        self._bad_points: list[list[Tensor]] = []

    def note_bad_point(self, optimizer: Optimizer) -> None:
        """The gradients here are bad: the step must not end here."""
        self._bad_points.append([p.detach().clone() for p in params_of(optimizer)])

    def ends_badly(self, optimizer: Optimizer) -> bool:
        """Whether parameters or state are non-finite now, or the gradients at this point were."""
        params = params_of(optimizer)
        if any(all(map(torch.equal, params, point)) for point in self._bad_points):
            return True
        values = [value for state in optimizer.state.values() for value in _flat(state.values())]
        numbers = [torch.tensor(v) if isinstance(v, float) else v for v in values]
        return not all_finite([*params, *numbers])  # host sync

    def restore(self, optimizer: Optimizer) -> None:
        with torch.no_grad():
            for param, value in self._params:
                param.copy_(value)
        optimizer.state.clear()
        for param, state in self._states.items():
            optimizer.state[param].update(_copy_state(state))


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors inside its lists are never written to, only replaced."""
    return {key: _copy_value(value) for key, value in state.items()}


def _copy_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, list) else [value]
