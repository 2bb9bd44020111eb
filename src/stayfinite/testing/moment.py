"""When a fault strikes: at a step, counted in attempted updates, or when it is run again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from stayfinite.detect.entrypoints import together
from stayfinite.detect.hooks import Attachment, StepListener, watch_scalers, watch_steps
from stayfinite.detect.repeats import is_run_again
from stayfinite.detect.walk import named_tensors


class Attempts(StepListener):
    """How many updates one optimizer has attempted; without one, the most of any.

    Vetoed updates and those that a GradScaler skipped are attempts too; a guard's own
    repetitions of a step are not.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._only = optimizer
        self._counts: Any = WeakIdKeyDictionary()
        self.count = 0

    @property
    def step(self) -> int:
        """The step that runs now, counted from 0."""
        return max(0, self.count - 1) if is_run_again() else self.count

    def attach(self) -> Attachment:
        return together(watch_steps(self, optimizer=self._only, defer=False), watch_scalers(self))

    def judge(self, optimizer: Optimizer, gradients: list[Tensor], *, on_device: bool) -> None:
        """Nothing to say: we only count."""

    def skipped_by_scaler(self, optimizer: Optimizer, *, scaler: Any) -> None:
        """It is told as stepped, too."""
        return

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        if not is_run_again() and (self._only is None or optimizer is self._only):
            self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
            self.count = max(self.count, self._counts[optimizer])


class Again:
    """Knows a step again by the bytes of some tensors."""

    def __init__(self) -> None:
        self._now: bytes | None = None
        self._kept: bytes | None = None
        self.is_same = False

    def see(self, tensors: Iterable[Tensor]) -> None:
        """A step begins, perhaps the same as before."""
        self._now = _fingerprint(tensors)
        self.is_same = self._now == self._kept

    def remember(self) -> None:
        """The step that has begun is the one; it is not the same until it is seen again."""
        self._kept, self.is_same = self._now, False


def watch_calls(model: nn.Module, again: Again) -> Attachment:
    """Let it see the weights and the inputs of the model whenever the model is called.

    So a step that was undone is the same when it is run again; the one with the next batch,
    or with the same batch after an update, is not.
    """

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            inputs = [tensor for _, tensor in named_tensors([args, kwargs], "")]
            again.see([*model.parameters(), *inputs])

    hook = model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    return Attachment(hook.remove)


def _fingerprint(tensors: Iterable[Tensor]) -> bytes:
    """A hash of the bytes of all tensors."""
    result = hashlib.blake2b()
    with _disable_current_modes(), torch.no_grad():
        for tensor in tensors:
            dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor
            flat = dense.detach().cpu().contiguous().reshape(-1)
            result.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            result.update(flat.view(torch.uint8).numpy().tobytes())
    return result.digest()
