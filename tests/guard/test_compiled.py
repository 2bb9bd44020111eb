"""A step that is bad only as compiled code is not called a passing fault."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stayfinite
from stayfinite.errors import TrainingAbortedError
from stayfinite.records import Incident


@pytest.fixture(autouse=True)
def _compile_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


class WrongCompiler:
    """A backend whose code is right until it is told to go wrong, `times` times."""

    def __init__(self, times: int = 1000) -> None:
        self.is_wrong = False
        self._left = repeat(True, times)  # a number would be put back after a replay

    def __call__(self, graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            out, is_wrong = graph(*args), self.is_wrong and next(self._left, False)
            return [o * float("nan") if is_wrong else o for o in out]

        return run


def net_of(compiler: WrongCompiler) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(4, 1)
    return torch.compile(net, backend=compiler), torch.optim.SGD(net.parameters(), lr=0.01)


def is_said_of_compiler(incident: Incident) -> bool:
    diagnosis = incident.diagnosis
    assert diagnosis is not None
    is_sure = "bad as compiled code, and finite twice in eager mode" in diagnosis.why
    is_possible = "run again in eager mode" in diagnosis.why
    assert is_sure == (diagnosis.confidence == "proven")
    assert is_possible == (diagnosis.confidence == "possible")
    return is_sure


def train(net: nn.Module, optimizer: torch.optim.Optimizer, compiler: WrongCompiler) -> None:
    batches = [torch.randn(8, 4) for _ in range(12)]
    with stayfinite.watch(net, optimizer, on_nan="stop", sinks=[]):
        for number, x in enumerate(batches):
            compiler.is_wrong = number == 6
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize(("times", "is_sure"), [(1000, True), (1, False)])
def test_loop_that_is_bad_only_when_compiled(times: int, is_sure: bool) -> None:
    compiler = WrongCompiler(times)
    with pytest.raises(TrainingAbortedError) as caught:
        train(*net_of(compiler), compiler)
    incident = caught.value.incident
    assert incident is not None
    assert incident.step == 6
    assert is_said_of_compiler(incident) is is_sure


def test_guarded_step_that_is_bad_only_when_compiled() -> None:
    compiler = WrongCompiler()
    net, optimizer = net_of(compiler)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    with stayfinite.watch(net, optimizer, sinks=[]) as guard:
        for number in range(8):
            compiler.is_wrong = number == 6
            guard.step(step, torch.randn(8, 4))
    assert len(guard.incidents) == 1
    assert not is_said_of_compiler(guard.incidents[0])


def test_torch_does_not_warn_of_hooks_that_are_ours() -> None:
    net, optimizer = net_of(WrongCompiler())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with stayfinite.watch(net, optimizer, sinks=[]):
            net(torch.randn(8, 4)).square().mean().backward()
        assert warnings.filters == before
    assert said == []
