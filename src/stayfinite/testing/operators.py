"""A fault in the result of an operator, wherever it runs: forward, backward or update."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from stayfinite.detect.hooks import Attachment
from stayfinite.testing.fault import Fault
from stayfinite.testing.names import ops_named


def at_op(fault: Fault, name: str) -> Attachment:
    mode = _Operators(fault, ops_named(name))
    mode.__enter__()  # type: ignore[no-untyped-call]
    return Attachment(mode.leave)


class _Operators(TorchDispatchMode):
    """The mode goes on at the begin of the block, so it is below those that look at results."""

    def __init__(self, fault: Fault, names: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fault = fault
        self._names = names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        full = str(func)
        if (full in self._names or full.rpartition(".")[0] in self._names) and self._fault.is_due():
            self._strike(result, full)
        return result

    def leave(self) -> None:
        """Go off, also from below modes that were switched on later and stay."""
        modes = _get_current_dispatch_mode_stack()
        above = modes[modes.index(self) + 1 :]
        for mode in [*reversed(above), self]:
            TorchDispatchMode.__exit__(mode, None, None, None)
        for mode in above:
            TorchDispatchMode.__enter__(mode)

    def _strike(self, result: Any, location: str) -> None:
        """In place, since the result of an operator is new memory, or is meant to be written."""
        results = [result] if isinstance(result, Tensor) else result
        found = next((each for each in results if self._fault.fits(each)), None)
        if found is not None:
            self._fault.write(found, location)
