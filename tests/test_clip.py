"""Clipping on true values: nothing finite is lost, nothing bad survives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stayfinite import ConfigError, InputError
from stayfinite.clip import clip_gradients

NAN, INF = math.nan, math.inf
LARGEST = {
    torch.float16: 65504.0,
    torch.bfloat16: 3e38,
    torch.float32: 3e38,
    torch.float64: 1e308,
}


def parameter(gradient: Any, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    gradient = torch.as_tensor(gradient, dtype=dtype)
    weight = nn.Parameter(torch.zeros(gradient.shape, dtype=dtype))
    weight.grad = gradient
    return weight


def gradient_of(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def together(weights: list[nn.Parameter]) -> Tensor:
    return torch.cat([gradient_of(weight).double().flatten() for weight in weights])


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a / a.abs().max(), b / b.abs().max()
    return float(a @ b / a.norm() / b.norm())


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


elements = st.floats(width=32, allow_nan=False, allow_infinity=False)
some_gradients = st.lists(st.lists(elements, min_size=1, max_size=6), min_size=1, max_size=4)
limits = st.floats(min_value=1e-3, max_value=1e3)


@given(some_gradients, limits, st.sampled_from([1.0, 2.0, 3.0, INF]))
def test_finite_gradients_keep_their_direction_and_get_the_norm(
    values: list[list[float]], limit: float, power: float
) -> None:
    weights = [parameter(each) for each in values]
    before = together(weights)
    true = float(torch.linalg.vector_norm(before / 3e38, power)) * 3e38
    result = clip_gradients(weights, limit, norm_type=power)
    after = together(weights)
    assert result.norm == pytest.approx(true, rel=1e-5, abs=1e-44)
    assert result.was_clipped == (result.norm > limit)
    assert not result.dropped
    assert result.kept_elements == before.numel()
    if result.was_clipped:
        assert float(torch.linalg.vector_norm(after, power)) == pytest.approx(limit, rel=1e-5)
        assert cosine(before, after) >= 1 - 1e-6
    else:
        assert as_bytes(before) == as_bytes(after)


@given(some_gradients, limits, st.data())
def test_bad_elements_count_as_if_they_were_zero(
    values: list[list[float]], limit: float, data: st.DataObject
) -> None:
    bad = [data.draw(st.lists(st.booleans(), min_size=len(v), max_size=len(v))) for v in values]
    poison = data.draw(st.sampled_from([NAN, INF, -INF]))
    rows = list(zip(values, bad, strict=True))
    poisoned = [parameter([poison if b else v for v, b in zip(*row, strict=True)]) for row in rows]
    cleaned = [parameter([0.0 if b else v for v, b in zip(*row, strict=True)]) for row in rows]
    result = clip_gradients(poisoned, limit)
    expected = clip_gradients(cleaned, limit)
    assert result.norm == pytest.approx(expected.norm, rel=1e-6)
    assert torch.allclose(together(poisoned), together(cleaned), rtol=1e-5, atol=0)
    assert result.dropped == tuple(str(n) for n, own in enumerate(bad) if any(own))
    assert result.dropped_elements == sum(map(sum, bad))
    assert result.kept_elements + result.dropped_elements == together(cleaned).numel()


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("count", [1, 3, 1000])
def test_largest_values_of_each_dtype_are_not_zeroed(dtype: torch.dtype, count: int) -> None:
    weights = [parameter([LARGEST[dtype], -LARGEST[dtype] / 2] * count, dtype)]
    before = together(weights)
    assert clip_gradients(weights, 1.0).was_clipped
    after = together(weights)
    assert float(after.norm()) == pytest.approx(1.0, rel=1e-2)
    assert cosine(before, after) >= 1 - 1e-6
    assert bool((after != 0).all())


def test_norm_may_be_larger_than_any_float32() -> None:
    result = clip_gradients(parameter([3e38] * 100), 1.0)
    assert float(result) == pytest.approx(3e39)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_too_small_to_be_squared_have_a_norm(dtype: torch.dtype) -> None:
    weight = parameter([3e-30, 4e-30], dtype)
    assert clip_gradients(weight, 1e-30).norm == pytest.approx(5e-30, rel=1e-6, abs=0)
    assert gradient_of(weight).tolist() == pytest.approx([0.6e-30, 0.8e-30], rel=1e-6, abs=0)


def test_many_gradients_too_small_to_be_squared_have_a_norm() -> None:
    weight = parameter(torch.full((90_000,), 3e-30))
    assert clip_gradients(weight, 1.0).norm == pytest.approx(9e-28, rel=1e-6, abs=0)
    weight = parameter([3e-200, 4e-200], torch.float64)
    assert clip_gradients(weight, 1.0).norm == pytest.approx(5e-200, rel=1e-6, abs=0)


def test_factor_that_is_no_normal_number_is_exact_all_the_same() -> None:
    weight = parameter([3e38, 4e30])
    clip_gradients(weight, 1e-3)
    assert gradient_of(weight).tolist() == pytest.approx([1e-3, 4e-11 / 3], rel=1e-6, abs=0)


def test_other_powers_are_taken_of_true_values() -> None:
    assert clip_gradients(parameter([3e-20] * 8), 1.0, norm_type=3).norm == pytest.approx(
        6e-20, rel=1e-6, abs=0
    )
    assert clip_gradients(parameter([3e30] * 8), 1.0, norm_type=3).norm == pytest.approx(6e30)


def test_norm_of_many_elements_is_exact() -> None:
    weight = parameter(torch.full((3_000_000,), 0.1))
    true = 0.1 * math.sqrt(3_000_000)
    assert clip_gradients(weight, INF).norm == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("count", [1000, 8193, 65_537, 90_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_norm_of_any_length_has_six_digits(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for gradient in (torch.full((count,), 0.1), torch.randn(count), torch.randn(count, 2)[:, 0]):
        weight = nn.Parameter(torch.zeros(count, dtype=dtype))
        weight.grad = gradient.to(dtype)
        true = float(weight.grad.double().norm())
        assert clip_gradients(weight, INF).norm == pytest.approx(true, rel=1e-6)


def test_healthy_gradients_are_left_alone_to_the_byte() -> None:
    weights = [parameter(torch.randn(5, 3)), parameter(torch.randn(4), torch.bfloat16)]
    before = [as_bytes(gradient_of(weight)) for weight in weights]
    result = clip_gradients(weights, 100.0)
    assert not result.was_clipped
    assert [as_bytes(gradient_of(weight)) for weight in weights] == before


def test_gradients_are_changed_in_place() -> None:
    weight = parameter([NAN, 8.0, 6.0])
    gradient = gradient_of(weight)
    where = gradient.data_ptr()
    clip_gradients(weight, 1.0)
    assert weight.grad is gradient
    assert gradient.data_ptr() == where
    assert gradient.tolist() == pytest.approx([0.0, 0.8, 0.6])


def test_whole_tensors_are_dropped_on_demand() -> None:
    bad, good = parameter([NAN, 8.0, 6.0]), parameter([3.0, 4.0])
    result = clip_gradients([bad, good], 10.0, drop="tensors")
    assert gradient_of(bad).tolist() == [0.0, 0.0, 0.0]
    assert gradient_of(good).tolist() == [3.0, 4.0]
    assert (result.norm, result.dropped, result.dropped_elements) == (5.0, ("0",), 3)


def test_bad_gradients_can_be_left_as_they_are() -> None:
    bad, good = parameter([NAN, 8e30, INF]), parameter([3e30, 4e30])
    before = [as_bytes(gradient_of(weight)) for weight in (bad, good)]
    result = clip_gradients([bad, good], 1.0, drop="nothing")
    assert [as_bytes(gradient_of(weight)) for weight in (bad, good)] == before
    assert math.isnan(result.norm)
    assert (result.was_clipped, result.dropped, result.dropped_elements) == (False, (), 0)
    assert clip_gradients(good, 1.0, drop="nothing").was_clipped


def test_nothing_but_bad_values_leaves_zeros() -> None:
    weight = parameter([NAN, INF])
    result = clip_gradients(weight, 1.0)
    assert gradient_of(weight).tolist() == [0.0, 0.0]
    assert (result.norm, result.was_clipped, result.kept_elements) == (0.0, False, 0)


def test_without_gradients_there_is_nothing_to_do() -> None:
    model = nn.Linear(2, 2)
    assert clip_gradients(model, 1.0).norm == 0.0
    assert clip_gradients([], 1.0).kept_elements == 0
    assert model.weight.grad is None


def test_infinite_limit_only_drops() -> None:
    weight = parameter([NAN, 3e38])
    assert not clip_gradients(weight, INF).was_clipped
    assert gradient_of(weight).tolist() == [0.0, pytest.approx(3e38)]


def test_dtypes_are_clipped_together() -> None:
    weights = [
        parameter([3.0], torch.float16),
        parameter([4.0], torch.float64),
        parameter([0.0], torch.bfloat16),
        parameter([12.0], torch.float32),
    ]
    assert clip_gradients(weights, 1.3).norm == pytest.approx(13.0)
    assert together(weights).tolist() == pytest.approx([0.3, 0.4, 0.0, 1.2], rel=1e-3)


def test_repeated_entries_of_a_sparse_gradient_are_added_first() -> None:
    embedding = nn.Embedding(10, 1, sparse=True)
    (3 * embedding(torch.tensor([1, 1, 2])).sum()).backward()
    gradient = embedding.weight.grad
    assert gradient is not None
    assert not gradient.is_coalesced()
    result = clip_gradients(embedding, 1.0)
    assert result.norm == pytest.approx(math.hypot(6.0, 3.0))
    assert embedding.weight.grad is gradient
    assert gradient.to_dense()[:3, 0].tolist() == pytest.approx([0.0, 2 / 5**0.5, 1 / 5**0.5])


def test_bad_elements_of_a_sparse_gradient_are_dropped() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None
    gradient._values()[0, 0] = NAN
    result = clip_gradients(embedding, INF)
    assert (result.dropped, result.dropped_elements, result.kept_elements) == (("weight",), 1, 3)
    assert bool(gradient.to_dense().isfinite().all())


def test_complex_gradients_have_the_norm_of_their_magnitudes() -> None:
    weight = parameter([3e38 + 3e38j, NAN + 1j, 0j], torch.complex64)
    result = clip_gradients(weight, 1.0, norm_type=INF)
    assert result.norm == pytest.approx(3e38 * 2**0.5)
    assert result.dropped_elements == 1
    root = 2**-0.5
    assert gradient_of(weight).tolist() == [pytest.approx(root + root * 1j), 0j, 0j]


def test_expanded_gradient_counts_each_repeat_and_is_scaled_once() -> None:
    weight = nn.Parameter(torch.zeros(4, 2))
    weight.grad = torch.tensor([3.0, NAN]).expand(4, 2)
    result = clip_gradients(weight, 3.0)
    assert (result.norm, result.dropped_elements) == (pytest.approx(6.0), 4)
    assert weight.grad.tolist() == [[1.5, 0.0]] * 4


def test_strided_gradient_is_scaled_without_a_copy() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    weight = nn.Parameter(torch.zeros(4, 2))
    weight.grad = whole.t()[:, ::2]
    expected = whole.clone()
    expected[::2] *= 0.5 / float(whole[::2].norm())
    clip_gradients(weight, 0.5)
    assert torch.allclose(whole, expected)


def test_gradient_that_two_parameters_share_is_scaled_once() -> None:
    first, second = parameter([8.0, 6.0]), parameter([0.0, 0.0])
    second.grad = first.grad
    assert clip_gradients([first, second], 5.0).norm == pytest.approx(10.0)
    assert gradient_of(first).tolist() == pytest.approx([4.0, 3.0])


def test_gradient_with_a_graph_can_be_clipped() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    (weight.grad,) = torch.autograd.grad((weight**2).sum(), weight, create_graph=True)
    assert gradient_of(weight).requires_grad
    assert clip_gradients(weight, 1.0).norm == pytest.approx(10.0)
    assert gradient_of(weight).tolist() == pytest.approx([0.6, 0.8])
    weight.grad = None  # the graph and the gradient hold one another


def test_dropped_tensors_are_named_as_people_know_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def poisoned() -> list[nn.Parameter]:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        gradient_of(model[1].weight)[0, 0] = NAN
        return list(model.parameters())

    unnamed = torch.optim.SGD(model.parameters(), lr=0.1)
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    for target, names, expected in (
        (model, None, "1.weight"),
        (unnamed, None, "2"),
        (named, None, "1.weight"),
        (model.parameters(), None, "2"),
        (model.parameters(), ["a", "b", "c", "d"], "c"),
    ):
        poisoned()
        assert clip_gradients(target, 1.0, names=names).dropped == (expected,)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_norm": 0.0}, "max_norm is 0.0; it must be greater than 0"),
        ({"max_norm": NAN}, "max_norm is nan"),
        ({"max_norm": 1.0, "norm_type": 0.5}, "norm_type is 0.5; it must be at least 1"),
        ({"max_norm": 1.0, "drop": "rows"}, "drop is 'rows'; it must be one of elements, tensors"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        clip_gradients(parameter([1.0]), **options)


def test_wrong_targets_are_refused() -> None:
    with pytest.raises(InputError, match="got a str among the parameters"):
        clip_gradients(["weight"], 1.0)  # type: ignore[list-item]
