"""What forecasts measure, in trainings with unusual tensors, functions and optimizers."""

from __future__ import annotations

import gc
import io
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from stayfinite.prevent.forecast.forecaster import Forecaster
from stayfinite.prevent.forecast.outlook import Outlook, Row


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Where something has been compiled, activations are not measured."""
    forget_compilations()
    yield
    forget_compilations()


def forget_compilations() -> None:
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()


class Attention(nn.Module):
    def __init__(self, normalise: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.q, self.out, self.normalise = nn.Linear(4, 4), nn.Linear(4, 1), normalise

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        normalise = self.normalise or functional.softmax
        return self.out(normalise(q @ q.transpose(1, 2), dim=-1) @ q)


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float8_e4m3fn)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def trained(
    forecaster: Forecaster, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 4)).square().mean().backward()
        optimizer.step()
        forecaster.stepped(optimizer, loss=1.0)


def rows_of(forecaster: Forecaster) -> set[str]:
    return {row.signal for watched in forecaster._watched.values() for row in watched.sampler.rows}


def is_measuring(forecaster: Forecaster) -> bool:
    return forecaster._outputs._hook is not None


def empty_sequence(model: nn.Module) -> None:
    empty = torch.empty(1, 0, 4)
    functional.softmax(empty @ empty.transpose(1, 2), dim=-1)
    functional.scaled_dot_product_attention(empty, empty, empty)


def nested(model: nn.Module) -> None:
    parts = torch.nested.as_nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    model.q(parts)
    torch.softmax(parts, -1)
    parts.softmax(-1)


def eight_bits(model: nn.Module) -> None:
    Rounded()(torch.randn(2, 4, requires_grad=True))


def transformed(model: nn.Module) -> None:
    params = dict(model.named_parameters())

    def loss(given: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (x[None],)).square().mean()

    x = torch.randn(5, 3, 4)
    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    torch.func.jacrev(lambda one: model(one[None]))(x[0])


def without_memory(model: nn.Module) -> None:
    nn.Linear(4, 4, device="meta")(torch.empty(2, 4, device="meta"))
    functional.softmax(torch.empty(2, 3, 4, device="meta"), dim=-1)


def scripted(model: nn.Module) -> None:
    torch.jit.script(nn.Softmax(-1))
    assert "aminmax" not in str(torch.jit.trace(model, torch.randn(2, 3, 4)).inlined_graph)


def exported(model: nn.Module) -> None:
    for is_strict in (False, True):
        program = torch.export.export(model, (torch.randn(2, 3, 4),), strict=is_strict)
        assert not [node for node in program.graph.nodes if "amax" in str(node.target)]


def recorded_as_a_graph(model: nn.Module) -> None:
    x = torch.randn(2, 3, 4)
    graph = make_fx(model)(x).graph
    assert not [node for node in graph.nodes if "amax" in str(node.target)]


def sparse_output(model: nn.Module) -> None:
    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_sparse()

    Sparse()(torch.randn(2, 4, requires_grad=True))


def compiled(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = torch.compile(model, backend="eager", fullgraph=True)
        whole(torch.randn(2, 3, 4))


def pickled(model: nn.Module) -> None:
    held = Attention(functional.softmax)
    torch.save(held, io.BytesIO())
    pickle.dumps(torch.softmax)


UNUSUAL = [
    *(empty_sequence, nested, eight_bits, sparse_output, without_memory),
    *(transformed, recorded_as_a_graph, scripted, exported, compiled, pickled),
]


@pytest.mark.parametrize("unusual", UNUSUAL)
@pytest.mark.filterwarnings("ignore:.*prototype stage")  # nested tensors
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_what_scripts_do_while_a_step_is_measured_goes_on_as_without(
    unusual: Callable[[nn.Module], None],
) -> None:
    model = Attention()
    optimizer, forecaster = sgd(model), Forecaster()
    trained(forecaster, model, optimizer, 3)
    assert is_measuring(forecaster)
    unusual(model)
    trained(forecaster, model, optimizer, 3)
    assert not forecaster._failures.has_failed
    assert {"activation", "gradient", "attention_logits"} <= rows_of(forecaster)
    forecaster.close()


def test_an_error_of_ours_in_a_hook_ends_forecasting_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Attention()
    optimizer, forecaster = sgd(model), Forecaster()
    trained(forecaster, model, optimizer, 2)
    monkeypatch.setattr(forecaster._outputs, "_note", lambda *_: 1 / 0)
    trained(forecaster, model, optimizer, 4)
    assert forecaster._failures.has_failed
    assert not is_measuring(forecaster)
    assert len(caplog.records) == 1


def test_steps_of_many_optimizers_leave_one_hook_and_then_none() -> None:
    model = Attention()
    optimizers = [torch.optim.SGD([param], lr=1e-3) for param in model.parameters()]
    optimizers += [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1e-3) for _ in range(20)]
    forecaster = Forecaster()
    before = len(torch_module._global_forward_hooks)
    for _ in range(40):
        model(torch.randn(2, 3, 4)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            forecaster.stepped(optimizer, loss=1.0)
            assert len(torch_module._global_forward_hooks) <= before + 1
            assert not hasattr(getattr(Tensor.softmax, "__wrapped__", None), "__wrapped__")
    assert len(forecaster._watched) == 8
    forecaster.close()
    assert len(torch_module._global_forward_hooks) == before
    assert "softmax" not in vars(Tensor)


def test_an_optimizer_that_is_gone_or_makes_no_more_steps_keeps_no_hook() -> None:
    model, forecaster = Attention(), Forecaster()
    first = sgd(model)
    trained(forecaster, model, first, 3)
    assert is_measuring(forecaster)
    seen = weakref.ref(first)
    del first
    gc.collect()
    assert seen() is None
    assert not is_measuring(forecaster)
    second, third = sgd(model), sgd(model)
    trained(forecaster, model, second, 3)
    trained(forecaster, model, third, 49)
    hooked = 0
    for _ in range(64):
        trained(forecaster, model, third, 1)
        hooked += is_measuring(forecaster)
    assert hooked <= 4, "samples are 32 steps apart"
    forecaster.close()


def test_several_optimizers_of_one_training_tell_the_same_once() -> None:
    optimizers = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1e-3) for _ in range(3)]
    forecaster = Forecaster()
    for step in range(160):
        for optimizer in optimizers:
            forecaster.stepped(optimizer, loss=1.0 if step < 100 else 50.0)
    assert [each.signal for each in forecaster.forecasts] == ["loss_spike"]
    forecaster.close()


RATES: list[Any] = [lambda step: 0.1, "auto", (0.1, 0.2), torch.tensor([0.1, 0.2]), None, 0.1j]


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: type(rate).__name__)
def test_a_rate_that_is_no_number_is_not_known(rate: Any) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": rate})

        def step(self, closure: Any = None) -> None:
            pass

    model, forecaster = Attention(), Forecaster()
    optimizer = Own(model.parameters())
    trained(forecaster, model, optimizer, 4)
    assert not forecaster._failures.has_failed
    (watched,) = forecaster._watched.values()
    assert watched._rate is None
    forecaster.close()


def test_doubles_and_complex_numbers_are_measured_without_a_warning() -> None:
    model = nn.Linear(4, 4).double()
    whole = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    forecaster = Forecaster()
    for optimizer in (torch.optim.Adam(model.parameters()), torch.optim.Adam([whole])):
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 4).double()).square().mean()
            (loss + (whole @ whole).abs().mean()).backward()
            optimizer.step()
            forecaster.stepped(optimizer, loss=1.0)
    assert not forecaster._failures.has_failed
    assert "grad_norm" in rows_of(forecaster)
    forecaster.close()


def test_what_modules_return_is_not_kept_alive() -> None:
    model, kept = nn.Linear(4, 4), []
    optimizer, forecaster = sgd(model), Forecaster()
    for _ in range(4):
        output = model(torch.randn(2, 4))
        kept.append(weakref.ref(output))
        output.sum().backward()
        del output
        assert kept[-1]() is None
        optimizer.step()
        forecaster.stepped(optimizer, loss=1.0)
    forecaster.close()


def test_a_gradient_that_a_scaler_has_skipped_is_followed_on() -> None:
    outlook = Outlook([Row(signal="gradient", dtype="float16", limit=65504.0)])
    at = np.zeros(1, dtype=np.int64)
    told = []
    for step in range(400):
        size = 2.0 if step < 200 else 2.0 + 0.1 * (step - 200)
        if outlook.is_due(step) and size < 16:
            value = np.inf if step == 2 else 2.0**size
            told.append(outlook.learn(step, at, np.array([value])))
    assert any(told)
