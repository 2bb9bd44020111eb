"""What the tests here share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from as_before import torch_as_before as torch_as_before
from scenes import everything
from torch import nn


@pytest.fixture
def untouched() -> Callable[[nn.Module], Callable[[], bool]]:
    def remember(model: nn.Module) -> Callable[[], bool]:
        before = everything(model)
        return lambda: everything(model) == before

    return remember
