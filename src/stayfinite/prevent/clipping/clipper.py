"""AdaptiveClipper: clip_gradients with a limit that is learnt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from stayfinite.clip.gradients import check_drop
from stayfinite.clip.memory import Drop
from stayfinite.clip.result import ClipResult
from stayfinite.clip.targets import Target, gradients_in, listed
from stayfinite.errors import ConfigError
from stayfinite.prevent.clipping.per_tensor import PerTensor
from stayfinite.prevent.clipping.per_unit import PerUnit
from stayfinite.prevent.clipping.percentile import Percentile
from stayfinite.prevent.clipping.robust import Robust
from stayfinite.prevent.clipping.rule import Rule
from stayfinite.prevent.clipping.zscore import ZScore

Mode = Literal["robust", "percentile", "zscore", "per_unit", "per_tensor"]
_RULES: dict[str, type[Rule]] = {
    "robust": Robust,
    "percentile": Percentile,
    "zscore": ZScore,
    "per_unit": PerUnit,
    "per_tensor": PerTensor,
}


class AdaptiveClipper:
    """Clips the gradients of a target to what is usual for them; call `clip()` before each update.

    The target is a module, an optimizer, a parameter or several. The mode is a name, or one of
    the classes with options: `Robust`, `Percentile`, `ZScore`, `PerUnit`, `PerTensor`. Bad values
    are dropped as in `clip_gradients`; a step in which there were any is never learnt from. Under
    a GradScaler, call `unscale_` first: the norms must be those of the true gradients.

    It has the methods of a scheduler: `watch(..., scheduler=[scheduler, clipper])` takes back
    what was learnt in a step that is undone, and checkpoints carry it.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> clipper = AdaptiveClipper(weight)
    >>> for size in (1.0, 1.0, 1000.0):
    ...     weight.grad = torch.tensor([0.6, 0.8]) * size
    ...     result = clipper.clip()
    >>> result.was_clipped, weight.grad
    (True, tensor([3., 4.]))
    """

    # Without a __dict__ a snapshot asks for state_dict, and does not walk into the parameters.
    __slots__ = ("__weakref__", "_drop", "_names", "_rule", "_statistics", "_target")

    def __init__(
        self,
        target: Target,
        mode: Mode | Rule = "robust",
        *,
        drop: Drop = "elements",
        names: Iterable[str] | None = None,
    ) -> None:
        check_drop(drop)
        self._rule = _rule_of(mode)
        self._statistics = self._rule.begin()
        self._drop: Drop = drop
        self._names = None if names is None else list(names)
        # An iterator of parameters can be gone through only once.
        self._target = target if isinstance(target, (nn.Module, Optimizer)) else listed(target)

    @property
    def rule(self) -> Rule:
        """The mode with its options."""
        return self._rule

    @property
    def threshold(self) -> float:
        """The norm above which all gradients together are clipped.

        It is inf before the first norm, and where each tensor or unit has a limit of its own.
        """
        return self._statistics.threshold

    @property
    def thresholds(self) -> dict[str, float]:
        """The limits of the tensors by their names, with mode per_tensor; else nothing."""
        return self._statistics.thresholds

    @torch.no_grad()
    def clip(self) -> ClipResult:
        """Clip the gradients in place, and learn from them. One pass, and one host read."""
        return self._statistics.clip(gradients_in(self._target, self._names), self._drop)

    def state_dict(self) -> dict[str, Any]:
        """What has been learnt, as plain data and tensors on the CPU; the options are not in it."""
        return {"mode": self._rule.mode, **self._statistics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if state["mode"] != self._rule.mode:
            raise ConfigError(
                f"the state is of mode {state['mode']!r}, and this clipper has mode "
                f"{self._rule.mode!r}; make one with mode={state['mode']!r}."
            )
        self._statistics.load_state_dict(state)


def _rule_of(mode: Mode | Rule) -> Rule:
    if isinstance(mode, str) and mode in _RULES:
        return _RULES[mode]()
    if isinstance(mode, str) or not hasattr(mode, "begin"):
        raise ConfigError(
            f"mode is {mode!r}; it must be one of {', '.join(get_args(Mode))}, or an object "
            "with options such as Robust()."
        )
    return mode
