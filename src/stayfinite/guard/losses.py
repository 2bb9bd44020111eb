"""The losses that backward passes begin from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from stayfinite.detect.norms import finite_number
from stayfinite.detect.scan import all_finite, nonfinite
from stayfinite.detect.walk import named_tensors
from stayfinite.evidence import Evidence

_MOST_FAR = 64


class Losses:
    """Judges losses as they were before a scaler multiplied them.

    One that is on another device is judged there; `far_flags` tells of it at the update.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._unscaled: Any = WeakIdKeyDictionary()
        self._far: list[Tensor] = []
        self._is_last_bad: bool | Tensor = False

    def scaled(self, losses: Any, results: Any) -> None:
        """A scaler has made `results` of `losses`."""
        self._evidence.uses_scaler = True
        before, after = named_tensors(losses, ""), named_tensors(results, "")
        for (_, loss), (_, result) in zip(before, after, strict=False):
            self._unscaled[result] = loss

    def bad_one(self, root: Tensor) -> Tensor | None:
        """The loss behind the root of a backward pass, if it is known to be bad."""
        loss: Tensor = self._unscaled.get(root, root) if self._evidence.uses_scaler else root
        value = finite_number(loss)
        if value is not None:
            self._is_last_bad = False
            self._evidence.saw_loss(value)
        elif loss.device.type != "cpu":
            self._saw_far(loss)
        elif not all_finite([loss]):
            self._is_last_bad = True
            self._evidence.bad_loss = loss.detach()
            return loss
        return None

    def _saw_far(self, loss: Tensor) -> None:
        flag = self._is_last_bad = nonfinite([loss], exact_on_device=True)
        if len(self._far) >= _MOST_FAR:  # no optimizer asks for them, so they are not all kept
            flag = torch.stack([*self._far, flag]).any()
            self._far.clear()
        self._far.append(flag)
        self._evidence.saw_loss(loss.detach())

    def is_last_bad(self) -> bool:
        """Whether the loss of the last backward pass was bad."""
        return bool(self._is_last_bad)  # host sync

    def any_far_bad(self) -> bool:
        """Whether one was bad that nobody has asked for; for the end, when no update comes."""
        return any(map(bool, self._far))  # host sync

    def far_flags(self) -> list[Tensor]:
        """One for each loss that was far away: NaN where it was bad, else 0. Each is told once."""
        if not self._far:
            return []
        far, self._far = self._far, []
        return [torch.where(flag, float("nan"), 0.0) for flag in far]
