"""From a backward pass to the line of the forward operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scenes import Net, gradient, guilty, origin
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint


def test_root_at_zero_is_named_by_its_forward_line() -> None:
    found = origin(lambda: gradient(lambda x: torch.sqrt(x) * 2, 0.0, 1.0))
    assert (found.phase, found.node) == ("backward", "SqrtBackward0")
    assert found.facts["expression"] == "torch.sqrt(x)"


def test_gradient_from_autograd_grad_is_traced() -> None:
    def step() -> Tensor:
        x = torch.zeros(2, requires_grad=True)
        y = x.pow(0.5)
        (slope,) = torch.autograd.grad(y.sum(), x)
        return slope

    assert guilty(step) == "x.pow(0.5)"


class Penalised(nn.Module):
    """A critic whose gradient penalty has a norm at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(-1)


def test_gradient_penalty_is_the_line_of_the_norm() -> None:
    critic = Penalised()

    def step() -> Tensor:
        x = torch.ones(4, 3, requires_grad=True)
        score = critic(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        length = (slope**2).sum(-1).sqrt()
        ((length - 1) ** 2).mean().backward()
        return critic.weight.grad

    found = origin(step)
    assert found.facts["expression"] == "(slope**2).sum(-1).sqrt()"
    assert "autograd.grad" not in found.code


def test_birth_in_a_double_backward_is_the_forward_line() -> None:
    def step() -> Tensor:
        x = torch.zeros(2, requires_grad=True)
        y = x.pow(1.5)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        slope.sum().backward()
        return x.grad

    found = origin(step)
    assert found.facts["expression"] == "x.pow(1.5)"
    assert found.facts["made_in"] == "PowBackward0"


class Reciprocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return slope / x


def test_backward_of_a_custom_function_is_named_by_its_own_line() -> None:
    found = origin(lambda: gradient(Reciprocal.apply, 0.0, 1.0))
    assert found.phase == "backward"
    assert found.facts["expression"] == "slope / x"
    assert (found.function, found.node) == ("backward", "ReciprocalBackward")


class WithFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Reciprocal.apply(x)


def test_custom_function_has_the_module_that_called_it() -> None:
    net = nn.Sequential(nn.Identity(), WithFunction())
    assert origin(lambda: gradient(net, 0.0, 1.0)).module == "1"


def test_tensor_hook_is_named_by_its_own_line() -> None:
    def step() -> Tensor:
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda slope: slope / 0.0)
        (x * 2).sum().backward()
        return x.grad

    assert guilty(step) == "slope / 0.0"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.inner(x) * 0.0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_region_keeps_its_line(reentrant: bool) -> None:
    block = Block()

    def step() -> Tensor:
        x = torch.ones(2, 3, requires_grad=True)
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        return block.inner.weight.grad

    found = origin(step)
    assert found.facts["expression"] == "torch.sqrt(self.inner(x) * 0.0)"
    assert found.phase == "backward"
    assert found.module == ""
    assert found.root == "Block"


class Overflowing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x * 100)


@pytest.mark.parametrize("reentrant", [True, False])
def test_birth_in_a_checkpointed_forward_is_a_forward_birth(reentrant: bool) -> None:
    block = Overflowing()

    def step() -> Tensor:
        x = torch.ones(2, requires_grad=True)
        return checkpoint(block, x, use_reentrant=reentrant).sum()

    found = origin(step)
    assert (found.phase, found.facts["expression"]) == ("forward", "torch.exp(x * 100)")


def test_gradient_from_func_grad_is_traced() -> None:
    def loss(x: Tensor) -> Tensor:
        return torch.sqrt(x).sum()

    assert guilty(lambda: grad(loss)(torch.zeros(2))) == "torch.sqrt(x)"


def test_gradients_for_each_sample_are_traced() -> None:
    net = Net()

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.sqrt(functional_call(net, params, (x,)) * 0.0).sum()

    def step() -> list[Tensor]:
        slopes = vmap(grad(loss), (None, 0))(dict(net.named_parameters()), torch.ones(4, 3))
        return list(slopes.values())

    assert guilty(step) == "torch.sqrt(functional_call(net, params, (x,)) * 0.0)"


def test_birth_inside_vmap_is_traced() -> None:
    assert guilty(lambda: vmap(lambda x: torch.log(x))(torch.zeros(3, 2))) == "torch.log(x)"


def test_second_gradient_of_func_is_traced() -> None:
    def loss(x: Tensor) -> Tensor:
        return x.pow(1.5).sum()

    step = grad(lambda x: grad(loss)(x).sum())
    assert guilty(lambda: step(torch.zeros(2))) == "x.pow(1.5)"


def test_forward_line_is_known_when_the_graph_is_used_again() -> None:
    def step() -> Tensor:
        x = torch.zeros(2, requires_grad=True)
        y = torch.sqrt(x).sum()
        y.backward(retain_graph=True)
        x.grad = None
        y.backward()
        return x.grad

    assert guilty(step) == "torch.sqrt(x)"


def test_graph_made_before_tracing_falls_back_to_the_line_of_the_backward() -> None:
    x = torch.zeros(2, requires_grad=True)
    y = torch.sqrt(x).sum()

    def step() -> Tensor:
        y.backward()
        return x.grad

    found = origin(step)
    assert found.node == "SqrtBackward0"
    assert found.code == "y.backward()"


def test_finite_gradient_of_the_branch_that_is_taken_has_no_origin() -> None:
    safe = gradient_of_safe_where
    assert origin(safe) is None


def gradient_of_safe_where() -> Tensor:
    def function(x: Tensor) -> Tensor:
        positive = torch.where(x > 0, x, 1.0)
        return torch.where(x > 0, torch.log(positive), 0.0)

    return gradient(function, 0.0, 1.0)


def test_module_of_a_backward_birth_is_the_one_that_ran_forward() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Normalise()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) * 2

    found = origin(lambda: gradient(Root(), 0.0, 0.0))
    assert (found.root, found.module) == ("Root", "norm")


class Normalise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).sum().sqrt()


def test_running_statistics_are_not_read_while_training() -> None:
    norm, x = nn.BatchNorm1d(2), torch.tensor([[1e20, 1.0], [-1e20, 2.0]])
    x.requires_grad_()

    def step() -> Tensor:
        (norm(x) * torch.tensor([1e25, 1.0])).sum().backward()
        assert x.grad is not None
        return x.grad

    for _ in range(2):  # the second time the running variance is Inf before the step
        x.grad = None
        found = origin(step)
        assert found is not None
        assert found.op == "aten.native_batch_norm_backward.default"
    assert norm.running_var is not None
    assert norm.running_var[0].isinf()


def test_running_statistics_are_read_in_evaluation() -> None:
    norm = nn.BatchNorm1d(2).eval()
    assert norm.running_mean is not None
    norm.running_mean[1] = torch.nan
    found = origin(lambda: norm(torch.ones(3, 2)))
    assert found is not None
    assert found.facts["buffer"]["name"] == "running_mean"
