"""The quick test never clears a gradient that is not finite, whatever it remembers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from stayfinite.detect.finite import _SMALL_PLAN, surely_finite

BAD = [float("nan"), float("inf"), float("-inf")]
SHAPES = [(), (3,), (0,), (4, 5), (_SMALL_PLAN + 1,), (2, _SMALL_PLAN)]


def owner() -> Optimizer:
    return SGD([torch.zeros(1)], lr=0.1)


shapes = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])


@settings(deadline=None)
@given(first=shapes, later=shapes, dtype=dtypes, bad=st.sampled_from(BAD), data=st.data())
def test_no_bad_value_is_cleared_by_an_old_plan(
    first: list[tuple[int, ...]],
    later: list[tuple[int, ...]],
    dtype: torch.dtype,
    bad: float,
    data: st.DataObject,
) -> None:
    optimizer = owner()
    assert surely_finite([torch.ones(shape) for shape in first], of=optimizer)
    gradients = [torch.ones(shape, dtype=dtype) for shape in later]
    surely_finite(gradients, of=optimizer)
    chosen = data.draw(st.sampled_from(gradients))
    if chosen.numel():
        chosen.view(-1)[data.draw(st.integers(0, chosen.numel() - 1))] = bad
        assert not surely_finite(gradients, of=optimizer)
        chosen.fill_(1.0)
        surely_finite(gradients, of=optimizer)
        assert surely_finite(gradients, of=optimizer) == (dtype in (torch.float32, torch.float64))


def expanded() -> Tensor:
    return torch.tensor(float("nan")).expand(3)


def with_graph() -> Tensor:
    return torch.full((3,), float("nan"), requires_grad=True) * 2


def sparse() -> Tensor:
    return torch.tensor([0.0, float("nan")]).to_sparse()


@pytest.mark.parametrize("make", [expanded, with_graph, sparse])
def test_gradient_of_another_kind_is_not_cleared(make: object) -> None:
    optimizer = owner()
    assert surely_finite([torch.ones(3)], of=optimizer)
    assert not surely_finite([make()], of=optimizer)  # type: ignore[operator]
    assert surely_finite([torch.ones(3)], of=optimizer)


def test_bytes_and_version_counter_stay() -> None:
    gradient = torch.tensor([1e-45, -0.0, 3.4e38, 1.0])
    before, version = gradient.numpy().tobytes(), gradient._version
    assert surely_finite([gradient], of=owner())
    assert (gradient.numpy().tobytes(), gradient._version) == (before, version)


def test_large_finite_values_are_left_to_the_exact_scan() -> None:
    assert not surely_finite([torch.full((_SMALL_PLAN + 1,), 3e38)], of=owner())


def test_nothing_is_not_cleared() -> None:
    assert not surely_finite([], of=owner())


def test_parameters_may_be_asked_for_and_their_versions_stay() -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(_SMALL_PLAN + 1))]
    of = owner()
    assert surely_finite(list(params), of=of)
    assert [param._version for param in params] == [0, 0]
    with torch.no_grad():
        params[1][-1] = float("nan")
    assert not surely_finite(list(params), of=of)


def test_shared_memory_is_not_written() -> None:
    assert not surely_finite([torch.ones(3).share_memory_()], of=owner())


def test_torch_is_left_as_it_was_also_after_a_refusal_and_inside_a_guard_of_others() -> None:
    def is_excluded() -> bool:
        return torch._C._dispatch_tls_is_dispatch_key_excluded(
            torch._C.DispatchKey.AutogradFunctionality
        )

    owner = object()
    assert surely_finite([torch.ones(3)], of=owner)
    assert not surely_finite([torch.ones(3).to_sparse()], of=owner)
    assert not is_excluded()
    with torch._C._AutoDispatchBelowAutograd():
        assert not surely_finite([torch.ones(3)], of=owner)
        assert is_excluded()
    assert not is_excluded()
