"""Every test ends with torch as it was before: no hook of ours, the scaler's own step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer, optimizer

sys.path.insert(0, str(Path(__file__).parent))  # for optimizer_variants


@pytest.fixture(autouse=True)
def hooks_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[weakref.ref[Optimizer]] = []
    original = Optimizer.__init__

    def noted(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Optimizer, "__init__", noted)
    before = _attached_globally()
    yield
    assert _attached_globally() == before
    for ref in made:
        if (alive := ref()) is not None:
            assert not _ours(alive)
            assert "found_inf" not in vars(alive)


def _attached_globally() -> tuple[Any, ...]:
    pre, post = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    return tuple(pre), tuple(post), GradScaler.step


def _ours(alive: Optimizer) -> list[Any]:
    hooks = [*alive._optimizer_step_pre_hooks.values(), *alive._optimizer_step_post_hooks.values()]
    owners = [type(getattr(hook, "__self__", None)) for hook in hooks]
    return [owner for owner in owners if owner.__module__.startswith("stayfinite")]
