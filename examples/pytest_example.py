"""Tests that fail when an operation makes a NaN or Inf that matters, with the report.

pytest examples/pytest_example.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


@pytest.mark.finite
def test_gradient_at_zero() -> None:
    x = torch.zeros(3, requires_grad=True)
    torch.sqrt(x + 1e-8).sum().backward()


def test_large_inputs(finite: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Softplus())
    finite(model(torch.full((2, 4), 1e4)))
