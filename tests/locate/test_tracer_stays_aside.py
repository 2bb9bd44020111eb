"""Whatever the user's tensors are, tracing never breaks the step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from scenes import Net, found, origin
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, vmap

from stayfinite.locate import tracer as tracer_module


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.weight)


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def sparse_input() -> None:
    Times()(torch.eye(3).to_sparse()).sum().backward()


def eight_bit_input() -> Tensor:
    return Cast()(torch.ones(3).to(torch.float8_e4m3fn))


def model_without_memory() -> None:
    net = nn.Linear(3, 3, device="meta")
    nn.init.xavier_uniform_(net.weight)
    net(torch.ones(2, 3, device="meta")).sum().backward()


def fake_tensors() -> None:
    with FakeTensorMode():
        nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()


def jagged_tensor() -> None:
    rows = [torch.ones(2, 3), torch.ones(1, 3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    nn.Linear(3, 1)(nested).values().sum().backward()


def batched_module() -> Any:
    net = Net()

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, params, (x,)).square().sum()

    return vmap(grad(loss), (None, 0))(dict(net.named_parameters()), torch.ones(4, 3))


def complex_numbers() -> Tensor:
    leaf = torch.ones(4, requires_grad=True)
    torch.fft.fft(leaf).abs().sum().backward()
    return leaf.grad


def empty_and_integer_tensors() -> Any:
    return torch.ones(0).sum(), torch.arange(5) // 2, torch.ones(3) > 0


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).dequantize()


WAYS = [
    sparse_input,
    eight_bit_input,
    model_without_memory,
    fake_tensors,
    jagged_tensor,
    batched_module,
    complex_numbers,
    empty_and_integer_tensors,
    quantized,
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_unusual_tensors_are_no_incident_and_no_failure(
    way: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "stayfinite"):
        assert found(way) == []
    assert caplog.records == []


def test_bad_value_of_a_sparse_tensor_is_found() -> None:
    def step() -> Tensor:
        table = torch.eye(3).to_sparse()
        return torch.sparse.mm(table / 0.0, torch.ones(3, 1))

    assert origin(step).facts["expression"] == "table / 0.0"


def test_bad_complex_value_is_found() -> None:
    def step() -> Tensor:
        turned = torch.polar(torch.ones(2), torch.zeros(2))
        return (turned / 0.0).real

    assert origin(step).facts["expression"] == "turned / 0.0"


@pytest.mark.parametrize("part", ["operators.learn", "tracer.is_bad", "tracer.written_by"])
def test_failure_of_our_own_is_logged_once_and_the_step_goes_on(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(f"stayfinite.locate.{part}", broken)
    with tracer_module.Tracer():
        net = Net()
        net(torch.ones(2, 3)).sum().backward()
        net.first.weight.data.add_(1.0)
    assert net.first.weight.grad is not None
    assert len(caplog.records) == 1
    assert caplog.records[0].name == "stayfinite"


def test_failing_listener_at_a_module_does_not_reach_the_user(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(module: nn.Module, args: Any) -> None:
        raise ZeroDivisionError("ours")

    with tracer_module.Tracer(on_enter=broken):
        assert Net()(torch.ones(2, 3)).shape == (2, 1)
    assert len(caplog.records) == 1


def test_error_of_the_user_passes_through_unchanged() -> None:
    with tracer_module.Tracer(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3) @ torch.ones(2, 3)
