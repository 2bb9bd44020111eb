"""Activations that are kept within a range, until the cause of large ones is found."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.utils._pytree import tree_map

from stayfinite.errors import ConfigError
from stayfinite.training import require_module

logger = logging.getLogger("stayfinite")

Selector = str | nn.Module | type[nn.Module]
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True, kw_only=True)
class ClampCount:
    """How many elements came out of a module, how many were moved, and how many were NaN."""

    elements: int
    clamped: int
    nan: int


def clamp_activations(
    model: nn.Module, min: float, max: float, *, modules: Iterable[Selector] | None = None
) -> ActivationClamp:
    """Limit what modules give out to [min, max], until `remove()` is called on the result.

    `modules` chooses by dotted name (`*` matches anything), type or the module itself; without it
    all modules below the model are limited, or the model if it has none below. A loss is left
    alone: beyond the limit it would have no gradient. A NaN stays a NaN, and is counted.

    This is a crutch, and says so in the log: where it acts, the gradient is 0 and the reason is
    still there. Costs three reads of each output and no host read.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.constant_(layer.weight, 1e6)
    >>> with clamp_activations(layer, -100, 100) as clamp:
    ...     layer(torch.ones(1, 2)).tolist()
    [[100.0, 100.0]]
    >>> clamp.counts
    {'': ClampCount(elements=2, clamped=2, nan=0)}
    """
    require_module(model)
    if not min < max:
        raise ConfigError(f"min is {min} and max is {max}; min must be less than max.")
    chosen = dict(_choose(model, modules))
    logger.warning(
        "clamp_activations keeps the outputs of %d modules within [%g, %g]. That is a crutch: "
        "beyond the range the gradient is 0, and what makes them large is still there. "
        "Find it with `stayfinite run`, then remove() this.",
        len(chosen),
        min,
        max,
    )
    return ActivationClamp(chosen, min, max)


class ActivationClamp:
    """The clamps on some modules; `remove()`, or the end of a with block, takes them away.

    >>> layer = nn.Identity()
    >>> clamp = clamp_activations(layer, -1, 1)
    >>> layer(torch.tensor([5.0])).tolist()
    [1.0]
    >>> clamp.remove()
    >>> layer(torch.tensor([5.0])).tolist()
    [5.0]
    """

    def __init__(self, modules: dict[str, nn.Module], low: float, high: float) -> None:
        self.min, self.max = low, high
        self._hooks = {name: _Clamp(low, high) for name in modules}
        self._handles = [
            module.register_forward_hook(self._hooks[name]) for name, module in modules.items()
        ]

    @property
    def counts(self) -> dict[str, ClampCount]:
        """What has been seen, by the name of the module; without those that were not called."""
        seen = {name: hook.seen.tolist() for name, hook in self._hooks.items()}  # host sync
        return {
            name: ClampCount(elements=elements, clamped=clamped, nan=nan)
            for name, (elements, clamped, nan) in seen.items()
            if elements
        }

    def remove(self) -> None:
        """Leave the modules as they were; the counts stay. A second call does nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def __enter__(self) -> ActivationClamp:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Clamp:
    """The forward hook of one module."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        # Elements, moved, NaN: in a tensor, for compiled code is compiled again for a new number.
        self.seen = torch.zeros(3, dtype=torch.int64)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(self._clamp, output)

    def _clamp(self, value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.dtype in _DTYPES
        if not is_real or value.layout is not torch.strided:
            return value
        # torch refuses a limit that the dtype cannot hold.
        limit = torch.finfo(value.dtype).max
        low, high = max(self.low, -limit), min(self.high, limit)
        with torch.no_grad():
            before = value.detach()
            moved = ((before < low) | (before > high)).sum()
            elements = torch.full_like(moved, before.numel())
            new = torch.stack([elements, moved, before.isnan().sum()])
            # Not in place: a tensor made under inference_mode could not be changed outside of it.
            self.seen = self.seen.to(new.device) + new
        return value.clamp(low, high)


def _choose(
    model: nn.Module, selectors: Iterable[Selector] | None
) -> Iterator[tuple[str, nn.Module]]:
    named = dict(model.named_modules())
    if selectors is None:
        below = {name: module for name, module in named.items() if module is not model}
        for name, module in (below or named).items():
            if not isinstance(module, _Loss):
                yield name, module
        return
    for selector in selectors:
        found = [item for item in named.items() if _is_chosen(*item, selector)]
        if not found:
            kind = selector if isinstance(selector, type) else type(selector)
            said = repr(selector) if isinstance(selector, str) else kind.__name__
            raise ConfigError(
                f"modules has {said}, which is not in the model; it has "
                f"{', '.join(name for name in named if name) or 'no modules below it'}."
            )
        yield from found


def _is_chosen(name: str, module: nn.Module, selector: Selector) -> bool:
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(name, selector)
    if isinstance(selector, nn.Module):
        return module is selector
    return isinstance(module, selector)
