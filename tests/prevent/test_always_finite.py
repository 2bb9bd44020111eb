"""Whatever finite numbers go in: the value is finite, and so are all gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from edges import DTYPES, gradients, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
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

Shape = tuple[int, ...]
MASK = torch.tensor([[True, True, False, True], [False] * 4, [True] * 4])
LABELS = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.5, 1.0], [0.0, 0.0, 0.25, 1.0]])
PLACES = torch.tensor([0.0, 1.75, 3.0])


@dataclass(frozen=True)
class Function:
    """One to test, and the shapes of the tensors that it takes."""

    call: Callable[..., Tensor]
    shapes: tuple[Shape, ...]


def on(*shapes: Shape) -> Callable[[Callable[..., Tensor]], Function]:
    return lambda call: Function(call, shapes)


LINE, ROWS = (8,), (3, 4)
FUNCTIONS = {
    "safe_log": on(LINE)(safe_log),
    "safe_sqrt": on(LINE)(safe_sqrt),
    "safe_div": on(LINE, LINE)(safe_div),
    "safe_div of 1": on(LINE)(lambda x: safe_div(1.0, x)),
    "safe_pow": on(LINE, LINE)(safe_pow),
    "safe_pow 0.5": on(LINE)(lambda x: safe_pow(x, 0.5)),
    "safe_pow 1.5": on(LINE)(lambda x: safe_pow(x, 1.5)),
    "safe_pow -3": on(LINE)(lambda x: safe_pow(x, -3)),
    "safe_acos": on(LINE)(safe_acos),
    "safe_atan2": on(LINE, LINE)(safe_atan2),
    "log1mexp": on(LINE)(log1mexp),
    "safe_norm": on(ROWS)(lambda x: safe_norm(x, -1)),
    "safe_norm of all": on(ROWS)(safe_norm),
    "masked_softmax": on(ROWS)(lambda x: masked_softmax(x, MASK) * LABELS.to(x.dtype)),
    "masked_mean": on(ROWS)(lambda x: masked_mean(x, MASK, -1)),
    "stable_bce": on(ROWS)(lambda x: stable_bce(x, LABELS)),
    "stable_bce, masked": on(ROWS)(lambda x: stable_bce(x, LABELS, mask=MASK, reduction="none")),
    "stable_bce, summed": on(ROWS)(lambda x: stable_bce(x, LABELS, reduction="sum")),
    "focal": on(ROWS)(lambda x: focal(x, LABELS)),
    "focal, gamma 0.5": on(ROWS)(lambda x: focal(x, LABELS, gamma=0.5, reduction="none")),
    "focal, gamma 0": on(ROWS)(lambda x: focal(x, LABELS, gamma=0.0, alpha=None)),
    "focal, gamma 5": on(ROWS)(lambda x: focal(x, LABELS, gamma=5.0, mask=MASK)),
    "dice": on(ROWS)(lambda x: dice(x, LABELS)),
    "dfl_loss": on(ROWS)(lambda x: dfl_loss(x, PLACES, reduction="none")),
    "dfl_loss by target": on(ROWS, (3,))(dfl_loss),
    "kl": on(ROWS, ROWS)(kl),
    "kl of each": on(ROWS, ROWS)(lambda p, q: kl(p, q, reduction="none")),
    "info_nce": on(ROWS, ROWS)(info_nce),
    "info_nce, cold": on(ROWS, ROWS)(lambda q, k: info_nce(q, k, temperature=1e-9)),
    "info_nce by temperature": on(ROWS, ROWS, ())(
        lambda q, k, t: info_nce(q, k, temperature=t, reduction="none")
    ),
    "giou": on(ROWS, ROWS)(lambda a, b: giou(a, b, reduction="none")),
    "ciou": on(ROWS, ROWS)(lambda a, b: ciou(a, b, reduction="none")),
}
EACH = pytest.mark.parametrize("name", FUNCTIONS)


@EACH
@settings(deadline=None)
@given(dtype=st.sampled_from(DTYPES), data=st.data())
def test_value_and_gradients_are_finite(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    function = FUNCTIONS[name]
    inputs = [data.draw(tensors(dtype, *shape)) for shape in function.shapes]
    value, found = gradients(function.call, *inputs)
    assert value.isfinite().all(), value
    for gradient, each in zip(found, inputs, strict=True):
        assert gradient.dtype == dtype
        assert gradient.shape == each.shape
        assert gradient.isfinite().all(), gradient


PAIRS = list(itertools.permutations(DTYPES, 2))


@pytest.mark.parametrize("name", ["safe_div", "safe_pow", "safe_atan2", "giou", "ciou"])
@settings(deadline=None)
@given(dtypes=st.sampled_from(PAIRS), data=st.data())
def test_operands_of_two_dtypes(
    name: str, dtypes: tuple[torch.dtype, torch.dtype], data: st.DataObject
) -> None:
    function = FUNCTIONS[name]
    inputs = [
        data.draw(tensors(dtype, *shape))
        for dtype, shape in zip(dtypes, function.shapes, strict=True)
    ]
    value, found = gradients(function.call, *inputs)
    assert value.isfinite().all(), value
    assert [gradient.dtype for gradient in found] == list(dtypes)
    assert all(gradient.isfinite().all() for gradient in found), found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EACH
def test_nan_is_not_hidden(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    for position in range(len(function.shapes)):
        inputs = [torch.full(shape, 0.5, dtype=dtype) for shape in function.shapes]
        inputs[position].view(-1)[0] = torch.nan
        assert function.call(*inputs).isnan().any(), f"NaN in input {position} disappeared"


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith("dfl_loss by")])
def test_a_vector_at_a_time_is_the_same_as_all(name: str) -> None:
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    inputs = [torch.rand(5, *shape) for shape in function.shapes]
    gradient = torch.func.grad(lambda *each: function.call(*each).sum())
    together = torch.func.vmap(gradient)(*inputs)
    for row, expected in enumerate(together):
        torch.testing.assert_close(gradient(*(each[row] for each in inputs)), expected)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@EACH
def test_autocast_changes_nothing(name: str, half: torch.dtype) -> None:
    torch.manual_seed(0)
    function = FUNCTIONS[name]
    inputs = [torch.rand(shape) for shape in function.shapes]

    def under_autocast(*leaves: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=half):
            return function.call(*leaves)

    got, expected = (gradients(call, *inputs) for call in (under_autocast, function.call))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
