"""Gradients of every kind that people have are judged and given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_variants import NAN, Recorder, image
from torch import Tensor, nn
from torch.optim import SGD

from stayfinite.detect.hooks import watch_steps


def complex_parameter() -> nn.Parameter:
    param = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    param.grad = torch.full((3,), complex(0.0, NAN))
    return param


def expanded() -> nn.Parameter:
    param = nn.Parameter(torch.ones(3, 4))
    param.grad = torch.tensor(NAN).expand(3, 4)
    return param


def sparse() -> nn.Parameter:
    param = nn.Parameter(torch.ones(5, 2))
    param.grad = torch.sparse_coo_tensor(
        [[1, 1]], [[1.0, NAN], [1.0, 1.0]], (5, 2), check_invariants=True
    )
    return param


def of(dtype: torch.dtype) -> nn.Parameter:
    param = nn.Parameter(torch.ones(4, dtype=dtype))
    param.grad = torch.full((4,), float("inf"), dtype=dtype)
    return param


def with_graph() -> nn.Parameter:
    param = nn.Parameter(torch.ones(4))
    torch.sqrt(param - 1).sum().backward(create_graph=True)
    return param


KINDS: dict[str, Any] = {
    "complex": complex_parameter,
    "expanded": expanded,
    "sparse": sparse,
    "fp16": lambda: of(torch.float16),
    "bf16": lambda: of(torch.bfloat16),
    "fp64": lambda: of(torch.float64),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind_are_judged_and_given_back(kind: str) -> None:
    param = KINDS[kind]()
    grad: Tensor = param.grad
    optimizer = SGD([{"params": [nn.Parameter(torch.ones(2))]}, {"params": [param], "lr": 0.5}])
    before, grad_before = image(optimizer), image(grad)
    with watch_steps(recorder := Recorder()):
        optimizer.step()
    assert recorder.events == ["refused"]
    assert image(optimizer) == before
    assert param.grad is grad
    assert image(grad) == grad_before


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradient_with_a_graph_of_its_own_is_judged() -> None:
    param = with_graph()
    with watch_steps(recorder := Recorder()):
        SGD([param], lr=0.1).step()
    param.grad = None
    assert recorder.events == ["refused"]
