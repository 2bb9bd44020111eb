"""On a device nothing waits: tensors of CUDA that are fake have no values that could be read."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import SGD, Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from stayfinite.detect import memory
from stayfinite.guard import Guard, GuardSettings
from stayfinite.guard import guard as guard_module
from stayfinite.prevent.forecast.forecaster import Forecaster
from stayfinite.settings import ROUND

STEPS = 40


class _Stream:
    """A copy to the host that was asked for without waiting; its answer is fetched later."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        return None


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device. A read is answered with 0."""

    READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        tensors = [each for each in args if isinstance(each, Tensor)]
        is_far = any(each.is_cuda for each in tensors)
        is_copy = name == "_to_copy" and str(kwargs.get("device")) == "cpu"
        waits = name in self.READS or (is_copy and not kwargs.get("non_blocking"))
        if is_far and waits:
            frames = [each for each in traceback.extract_stack() if "stayfinite/" in each.filename]
            where = frames[-1] if frames else None
            self.found.append(f"{name}, {where and (where.filename, where.lineno)}")
        if name in ("_local_scalar_dense", "is_nonzero"):
            return 0 if name == "_local_scalar_dense" else False
        return func(*args, **kwargs)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Fake tensors are looked at as real ones are."""
    before: Callable[[Tensor], bool] = memory._is_ordinary
    monkeypatch.setattr(memory, "_is_ordinary", lambda t: isinstance(t, FakeTensor) or before(t))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream())
    with torch.no_grad():
        yield FakeTensorMode()


def training(fake: FakeTensorMode, kind: type[Optimizer], **options: Any) -> Optimizer:
    """An optimizer on a fake device, with all its state."""
    with fake:
        params = [nn.Parameter(torch.empty(size, device="cuda")) for size in ((4, 3), (3,), (2, 2))]
        optimizer = kind(params, lr=0.1, **options)  # type: ignore[call-arg]
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()
    return optimizer


def waits(fake: FakeTensorMode, optimizer: Optimizer, steps: int = STEPS) -> list[str]:
    """What makes the host wait in these steps, whose gradients are set by hand."""
    is_fused = optimizer.param_groups[0]["fused"]
    with Waits() as counted:
        for _ in range(steps):
            with fake:
                for param in optimizer.param_groups[0]["params"]:
                    param.grad = torch.empty_like(param)
            with nullcontext() if is_fused else fake:
                optimizer.step()
    return counted.found


@pytest.mark.parametrize("on_nan", ["stop", "warn"])
def test_the_steps_of_a_fused_optimizer_are_judged_without_waiting(
    fake: FakeTensorMode, on_nan: Any
) -> None:
    optimizer = training(fake, Adam, fused=True)
    guard = Guard(GuardSettings(on_nan=on_nan))
    guard.attach()
    try:
        assert waits(fake, optimizer) == []
        assert guard.steps == STEPS
        assert guard.incidents == []
        assert not guard.aftermath().has_failed
    finally:
        guard.close()


def test_the_steps_of_another_optimizer_are_read_once_each(fake: FakeTensorMode) -> None:
    optimizer = training(fake, SGD, momentum=0.9)
    guard = Guard(GuardSettings())
    guard.attach()
    try:
        found = waits(fake, optimizer)
        assert len(found) == STEPS, found
        assert len(set(found)) == 1, found
        assert not guard.aftermath().has_failed
    finally:
        guard.close()


@pytest.mark.parametrize("where", [0, 2])
def test_bad_parameters_are_noticed_one_update_later(
    monkeypatch: pytest.MonkeyPatch, where: int
) -> None:
    monkeypatch.setattr(guard_module, "_is_on_cuda", lambda optimizer: True)
    params = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizer = SGD(params, lr=0.0)
    guard = Guard(GuardSettings(on_nan="warn", again="never"))
    guard.attach()
    try:
        for step in range(3 + ROUND + 1):
            for param in params:
                param.grad = torch.zeros(2)
            if step == 3:
                params[where].data.fill_(torch.nan)
            optimizer.step()
        (found,) = guard.incidents
        assert found.reports[0].location == f"parameters.{where}"
    finally:
        guard.close()


def test_signals_of_a_forecast_are_taken_without_waiting(fake: FakeTensorMode) -> None:
    optimizer = training(fake, Adam, fused=True)
    forecaster = Forecaster(nn.ParameterList(optimizer.param_groups[0]["params"]))
    try:
        with fake:
            loss = torch.empty((), device="cuda")
        with Waits() as counted:
            for _ in range(STEPS):
                forecaster.stepped(optimizer, loss=loss)
        assert counted.found == []
    finally:
        forecaster.close()


def test_a_read_would_be_counted(fake: FakeTensorMode) -> None:
    with fake:
        tensor = torch.empty(3, device="cuda")
    with Waits() as counted:
        tensor.sum().item()
        bool(tensor.sum())
        tensor.to("cpu")
        tensor.to("cpu", non_blocking=True)
    assert [each.split(",")[0] for each in counted.found] == [
        "_local_scalar_dense", "_local_scalar_dense", "_to_copy",
    ]  # fmt: skip
