"""What a fault does to one element."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stayfinite.errors import ConfigError
from stayfinite.testing import Harm

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
KINDS = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_one_element_becomes_the_value(dtype: torch.dtype, value: str) -> None:
    tensor = torch.ones(2, 3, dtype=dtype)
    hit = Harm(value=value, element=4).write(tensor, location="here", step=7)
    assert str(tensor[1, 1].real.item()) == value
    assert tensor.isfinite().sum() == 5
    assert (hit.step, hit.location, hit.element, hit.before) == (7, "here", 4, 1.0)
    assert str(hit.after) == value


@pytest.mark.parametrize("dtype", KINDS)
def test_a_flipped_bit_flips_back(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 5).to(dtype)
    for bit in range(8 * tensor.element_size()):
        harm = Harm(value="bitflip", element=2, bit=bit)
        harm.write(tensor, location="", step=0)
        assert tensor.tolist() != [1, 2, 3, 4]
        harm.write(tensor, location="", step=0)
        assert tensor.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bit_is_the_highest_of_the_exponent(dtype: torch.dtype) -> None:
    small, one = torch.tensor([0.5], dtype=dtype), torch.tensor([1.0], dtype=dtype)
    Harm(value="bitflip").write(small, location="", step=0)
    Harm(value="bitflip").write(one, location="", step=0)
    assert small.item() > torch.finfo(dtype).max / 4
    assert one.item() == math.inf


def test_bits_can_be_flipped_in_booleans() -> None:
    tensor = torch.tensor([True])
    Harm(value="bitflip", bit=0).write(tensor, location="", step=0)
    assert tensor.tolist() == [False]


def test_the_seed_chooses_the_element() -> None:
    chosen = {
        seed: Harm(seed=seed).write(torch.zeros(1000), location="", step=0).element
        for seed in (0, 1, 2, 3)
    }
    assert len(set(chosen.values())) == 4
    assert Harm(seed=3).write(torch.ones(10, 100), location="", step=0).element == chosen[3]


def test_random_numbers_are_not_drawn_from_torch() -> None:
    before = torch.get_rng_state()
    Harm().write(torch.zeros(9), location="", step=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_strided_views_are_written_where_they_lie() -> None:
    base = torch.zeros(3, 4)
    Harm(element=1).write(base.t()[1:], location="", step=0)
    assert base.isnan().nonzero().tolist() == [[1, 1]]


def test_copies_keep_their_gradient_and_the_original() -> None:
    leaf = torch.ones(3, requires_grad=True)
    copy, _ = Harm(element=0).copy(leaf, location="", step=0)
    copy[1:].sum().backward()
    assert leaf.isfinite().all()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0, 1.0, 1.0]


def test_writing_is_not_seen_by_autograd_nor_by_modes() -> None:
    class Loud(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(func)

    leaf = torch.ones(2, requires_grad=True)
    saved = leaf.exp()
    with Loud():
        Harm(element=1).write(saved, location="", step=0)
    saved.sum().backward()  # raises if autograd had noticed
    assert leaf.grad is not None
    assert leaf.grad.isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": "NaN"}, "value is 'NaN'; it must be one of 'nan', 'inf', '-inf', 'bitflip'."),
        ({"element": -1}, "element is -1; it must be at least 0."),
        ({"value": "nan", "bit": 3}, "bit is 3 but value is 'nan', not 'bitflip'."),
    ],
)
def test_wrong_options_are_said(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Harm(**options)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_an_element_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match="element is 6, but x has 6 elements, counted from 0"):
        Harm(element=6).write(torch.zeros(2, 3), location="x", step=0)


def test_a_bit_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match="bit is 32, but an element of x has 32 bits"):
        Harm(value="bitflip", bit=32).write(torch.zeros(2), location="x", step=0)


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(2, dtype=torch.int64), None])
def test_what_cannot_be_nan_does_not_fit(tensor: torch.Tensor | None) -> None:
    assert not Harm().fits(tensor)
