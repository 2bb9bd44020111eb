"""Compiled in one graph, with the values and gradients of eager mode, also at the edges."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from edges import gradients
from torch import Tensor

from stayfinite.prevent.losses import (
    ciou,
    dfl_loss,
    dice,
    focal,
    giou,
    info_nce,
    kl,
    masked_mean,
    masked_softmax,
    stable_bce,
)
from stayfinite.prevent.ops import (
    log1mexp,
    safe_acos,
    safe_atan2,
    safe_div,
    safe_log,
    safe_norm,
    safe_pow,
    safe_sqrt,
)

# torch's compiler does that itself, for every autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

ROWS = torch.tensor([[0.0, 1e-40, 0.5, 2.0], [3e38, -3e38, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
MASK = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])
PLACES, LABELS = torch.tensor([0.0, 1.5, 3.0]), torch.tensor([[0.0, 1.0, 0.5, 1.0]] * 3)
FUNCTIONS = {
    "safe_log": safe_log,
    "safe_sqrt": safe_sqrt,
    "safe_div": lambda x: safe_div(1.0, x),
    "safe_div by a constant": lambda x: safe_div(x, ROWS),
    "safe_pow": lambda x: safe_pow(x, 0.5),
    "safe_pow of two": lambda x: safe_pow(LABELS, x),
    "safe_acos": safe_acos,
    "safe_atan2": lambda x: safe_atan2(x, LABELS),
    "log1mexp": log1mexp,
    "safe_norm": lambda x: safe_norm(x, -1),
    "masked_softmax": lambda x: masked_softmax(x, MASK),
    "masked_mean": lambda x: masked_mean(x, MASK, -1),
    "stable_bce": lambda x: stable_bce(x, LABELS, mask=MASK),
    "focal": lambda x: focal(x, LABELS),
    "dice": lambda x: dice(x, LABELS),
    "dfl_loss": lambda x: dfl_loss(x, PLACES),
    "kl": lambda x: kl(x, LABELS),
    "info_nce": lambda x: info_nce(x, LABELS),
    "giou": lambda x: giou(x, LABELS),
    "ciou": lambda x: ciou(x, LABELS),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_is_the_same(name: str) -> None:
    same_when_compiled(FUNCTIONS[name], "eager")


def test_the_backward_pass_is_compiled_too() -> None:
    same_when_compiled(lambda x: safe_sqrt(x) + safe_pow(x, 0.5), "aot_eager")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_for_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the default backend, whose expm1 and tanh of small numbers are 0."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    same_when_compiled(log1mexp, "inductor")


def test_compiled_without_gradients() -> None:
    compiled = torch.compile(lambda x: safe_div(x, x), fullgraph=True, backend="eager")
    with torch.no_grad():
        assert compiled(torch.tensor([2.0, 0.0])).tolist() == [1.0, 0.0]


def same_when_compiled(function: Callable[[Tensor], Tensor], backend: str) -> None:
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(gradients(compiled, ROWS), gradients(function, ROWS))
