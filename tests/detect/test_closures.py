"""Optimizers that call a closure, once or many times, within one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_variants import Parameters, Recorder, image, make, step
from torch import Tensor, nn

from stayfinite.detect.hooks import watch_steps
from stayfinite.errors import TrainingAbortedError


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_that_ends_at_a_bad_point_is_taken_back(line_search: str | None) -> None:
    options = {"line_search_fn": line_search, "max_iter": 4}
    optimizer, params = make(torch.optim.LBFGS, options)
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        params.fill(bad=float("nan") if calls > 1 else None)
        return 1.0 if calls == 1 else float("nan")

    step(optimizer, params)
    before = image(optimizer)
    with watch_steps(recorder := Recorder()):
        optimizer.step(closure)
    assert image(optimizer) == before
    assert recorder.events == ["refused"]


def test_line_search_may_look_at_a_point_that_is_not_finite() -> None:
    param = nn.Parameter(torch.tensor([3.0]))
    optimizer = torch.optim.LBFGS([param], lr=1e30, line_search_fn="strong_wolfe", max_iter=6)
    seen: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**4).sum()
        loss.backward()
        seen.append(param.grad.item())
        return loss

    with watch_steps(recorder := Recorder()):
        optimizer.step(closure)
    assert float("-inf") in seen
    assert recorder.events == []
    assert torch.isfinite(param).all()


def test_abort_in_a_closure_leaves_lbfgs_as_it_was() -> None:
    optimizer, params = make(torch.optim.LBFGS, {})
    step(optimizer, params)
    before = image(optimizer)
    with watch_steps(Aborting()), pytest.raises(TrainingAbortedError):
        step(optimizer, params, bad=float("nan"))
    assert image(optimizer) == before


class Aborting(Recorder):
    def refused(self, optimizer: Any, gradients: Any, *, late: bool) -> bool:
        raise TrainingAbortedError("stop")


class TwiceCalling(torch.optim.SGD):
    """Like sharpness-aware methods: it asks the closure twice in one step."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        first = torch.enable_grad()(closure)()
        super().step()
        torch.enable_grad()(closure)()
        super().step()
        return first


@pytest.mark.parametrize("bad_call", [1, 2])
def test_closure_that_is_called_twice_is_judged_each_time(bad_call: int) -> None:
    params = Parameters(TwiceCalling)
    optimizer = TwiceCalling(params.all, lr=0.1)
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        params.fill(bad=float("nan") if calls == bad_call else None)
        return 1.0

    with watch_steps(recorder := Recorder()):
        optimizer.step(closure)
    assert all(torch.isfinite(p).all() for p in params.used)
    assert "refused" in recorder.events
    assert all(p.grad is not None for p in params.used)


class AskingTwice(torch.optim.Optimizer):
    """It asks the closure twice and then makes one update of its own."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        with torch.enable_grad():
            first = closure()
            closure()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.sub_(param.grad)
        return first


def test_step_that_was_refused_is_not_made_with_gradients_of_a_later_call() -> None:
    params = Parameters(torch.optim.SGD)
    optimizer = AskingTwice(params.all)
    values = iter([float("nan"), None])

    def closure() -> float:
        params.fill(bad=next(values))
        return 1.0

    before = image(optimizer)
    with watch_steps(recorder := Recorder()):
        optimizer.step(closure)
    assert recorder.events == ["refused"]
    assert image(optimizer) == before


class SuperCalling(torch.optim.SGD):
    """torch runs the hooks for its own step and again for the one of its base class."""

    spoil = False

    def step(self, closure: Any = None) -> Any:
        if self.spoil:
            self.param_groups[0]["params"][0].grad.mul_(float("nan"))
        return super().step(closure)


@pytest.mark.parametrize("spoil", [True, False])
def test_step_within_a_step_is_judged_again_and_told_once(spoil: bool) -> None:
    make(torch.optim.SGD, {})  # from here on SGD.step runs the hooks itself
    params = Parameters(SuperCalling)
    optimizer = SuperCalling(params.all, lr=0.1, momentum=0.9)
    with watch_steps(recorder := Recorder()):
        for is_bad in (False, True, False):
            optimizer.spoil = spoil and is_bad
            before = image(optimizer)
            step(optimizer, params, bad=float("nan") if is_bad and not spoil else None)
            assert (image(optimizer) == before) == is_bad
            assert all(p.grad is not None for p in params.used)
    assert recorder.events == ["refused"]


class MovingOn(torch.optim.SGD):
    """It goes on with the gradients after the step of its base class."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.01)


def test_refused_step_has_no_gradients_after_a_step_within_it_either() -> None:
    make(torch.optim.SGD, {})  # from here on SGD.step runs the hooks itself
    params = Parameters(MovingOn)
    optimizer = MovingOn(params.all, lr=0.1, momentum=0.9)
    with watch_steps(recorder := Recorder()):
        step(optimizer, params)
        before = image(optimizer)
        step(optimizer, params, bad=float("nan"))
    assert image(optimizer) == before
    assert recorder.events == ["refused"]
    assert all(p.grad is not None for p in params.used)
