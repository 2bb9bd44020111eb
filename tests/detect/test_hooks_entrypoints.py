"""The functions of torch that are wrapped while somebody watches, and what is told from there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from as_before import attached
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.func import grad
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from stayfinite.detect.finite import finite_norm
from stayfinite.detect.hooks import (
    Attachment,
    together,
    watch_backward,
    watch_loading,
    watch_scaling,
    wrapped,
)
from stayfinite.living import leaves_of


def loud(original: Any) -> Any:
    return lambda *args: original(*args) + 1


def test_wrapped_function_is_replaced_until_removed() -> None:
    owner = SimpleNamespace(f=lambda x: x)
    original = owner.f
    attachment = wrapped(owner, "f", loud)
    assert owner.f(1) == 2
    attachment.remove()
    assert owner.f is original


def test_wrapper_under_another_one_falls_silent() -> None:
    owner = SimpleNamespace(f=lambda x: x)
    first = wrapped(owner, "f", loud)
    second = wrapped(owner, "f", loud)
    assert owner.f(1) == 3
    first.remove()
    assert owner.f(1) == 2
    second.remove()
    assert owner.f(1) == 1


def test_wrapper_of_somebody_else_stays_in_place() -> None:
    owner = SimpleNamespace(f=lambda x: x)
    ours = wrapped(owner, "f", loud)
    inner = owner.f
    owner.f = theirs = lambda x: inner(x) * 10
    ours.remove()
    assert owner.f is theirs
    assert owner.f(1) == 10


def test_attachments_are_removed_last_first_and_all_of_them() -> None:
    told: list[int] = []

    def failing() -> None:
        told.append(2)
        raise RuntimeError("in the middle")

    both = together(
        Attachment(lambda: told.append(1), flush=lambda: told.append(10)),
        Attachment(failing),
        Attachment(lambda: told.append(3)),
    )
    both.flush()
    with pytest.raises(RuntimeError, match="in the middle"):
        both.remove()
    assert told == [10, 3, 2, 1]
    both.remove()
    assert told == [10, 3, 2, 1]


def by_tensor(x: Tensor) -> None:
    x.sum().backward()


def by_autograd(x: Tensor) -> None:
    torch.autograd.backward([x.sum()])


def by_grad(x: Tensor) -> None:
    torch.autograd.grad(x.sum(), x)


def by_func(x: Tensor) -> None:
    grad(lambda y: (y * x.detach()).sum())(x.detach())


def by_checkpoint(x: Tensor) -> None:
    checkpoint(torch.sin, x, use_reentrant=True).sum().backward()


@pytest.mark.parametrize("way", [by_tensor, by_autograd, by_grad, by_func, by_checkpoint])
def test_every_backward_pass_is_told_once_before_and_after(way: Any) -> None:
    told: list[str] = []
    before = attached()
    with watch_backward(
        lambda roots, gradients: told.append(f"before {len(roots)}"),
        lambda result: told.append("after"),
    ):
        way(torch.ones(3, requires_grad=True))
    assert told == ["before 1", "after"]
    assert attached() == before


def test_results_of_autograd_are_as_ever_while_watched() -> None:
    x = torch.ones(3, requires_grad=True)
    with watch_backward(lambda *_: None, lambda _: None):
        (slope,) = torch.autograd.grad((x**2).sum(), x)
        (x**3).sum().backward()
    assert slope.tolist() == [2.0] * 3
    assert x.grad.tolist() == [3.0] * 3


def test_backward_pass_after_one_that_raised_is_told() -> None:
    told: list[str] = []

    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Tensor:
            raise KeyError("of the user")

    x = torch.ones(3, requires_grad=True)
    with watch_backward(lambda *_: told.append("before"), lambda _: told.append("after")):
        with pytest.raises(KeyError):
            Raising.apply(x).sum().backward()
        x.sum().backward()
    assert told == ["before", "before", "after"]


def test_scaling_is_told_with_both_losses() -> None:
    told: list[Any] = []
    scaler = GradScaler("cpu", init_scale=4.0)
    with watch_scaling(lambda *args: told.append(args)):
        scaled = scaler.scale(torch.tensor(2.0))
    assert scaled.item() == 8.0
    assert told[0][0] is scaler
    assert (told[0][1].item(), told[0][2].item()) == (2.0, 8.0)


def test_loading_is_told_before_it_happens() -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = SGD(net.parameters(), lr=0.1)
    before = net.weight.detach().clone()
    seen: list[Any] = []

    def loading(target: Any, state: Any) -> None:
        seen.append((type(target).__name__, torch.equal(net.weight, before)))

    with watch_loading(loading):
        net.load_state_dict(other.state_dict())
        optimizer.load_state_dict(state_dict=optimizer.state_dict())
    assert seen == [("Linear", True), ("SGD", False)]
    assert torch.equal(net.weight, other.weight)


@pytest.mark.parametrize(
    ("gradients", "norm"),
    [
        ([torch.tensor([3.0]), torch.tensor([4.0])], 5.0),
        ([torch.tensor([3.0], dtype=torch.bfloat16), torch.tensor([4.0])], 5.0),
        ([], None),
        ([torch.tensor([float("nan")])], None),
        ([torch.tensor([float("inf")])], None),
        ([torch.tensor([3e38, 3e38])], None),
        ([torch.tensor([1.0], dtype=torch.float16)], None),
        ([torch.tensor([[1.0]]).to_sparse()], None),
        ([torch.ones(1, device="meta")], None),
    ],
)
def test_norm_is_given_where_it_is_cheap_and_finite(
    gradients: list[Tensor], norm: float | None
) -> None:
    assert finite_norm(gradients) == (norm if norm is None else pytest.approx(norm))


def test_norm_that_overflows_float32_is_finite_over_several_tensors() -> None:
    assert finite_norm([torch.full((1,), 3e38)] * 4) == pytest.approx(6e38)


def test_leaves_are_those_that_will_get_a_gradient() -> None:
    net = nn.Linear(2, 2)
    frozen = torch.ones(2)
    loss = (net(frozen) * net.bias).sum()
    leaves = leaves_of([loss, loss * 2])
    assert len(leaves) == 2
    assert {id(leaf) for leaf in leaves} == {id(net.weight), id(net.bias)}


def test_root_without_a_graph_has_no_leaves() -> None:
    assert leaves_of([torch.ones(1)]) == []
    assert leaves_of([]) == []
