"""Every optimizer of torch goes back: its state, its counters, its groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moments import optimizer_bytes, places
from optimizer_variants import every_variant, make, step
from torch import nn
from torch.optim import Optimizer

from stayfinite.errors import NonFiniteError
from stayfinite.snapshot import TrainingState


@every_variant
@pytest.mark.parametrize("steps", [0, 2])
def test_optimizer_goes_back_and_on(
    cls: type[Optimizer], options: dict[str, Any], steps: int
) -> None:
    optimizer, params = make(cls, options)
    for _ in range(steps):
        step(optimizer, params)
    before, where, seed = optimizer_bytes(optimizer), places(optimizer), params._seed
    state = TrainingState(None, optimizer)
    snapshot = state.capture()

    def go_on() -> Any:
        params._seed = seed
        for _ in range(2):
            step(optimizer, params)
            optimizer.param_groups[0]["lr"] *= 0.5
        return optimizer_bytes(optimizer)

    after = go_on()
    assert after != before
    state.restore(snapshot)
    assert optimizer_bytes(optimizer) == before
    assert places(optimizer) == where
    assert go_on() == after


def adam() -> tuple[nn.Linear, torch.optim.Adam, TrainingState]:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return net, optimizer, TrainingState(net, optimizer)


def test_state_that_vanished_comes_back_as_the_same_tensors() -> None:
    net, optimizer, state = adam()
    before, where = optimizer_bytes(optimizer), places(optimizer)
    snapshot = state.capture()
    optimizer.state[net.weight].clear()
    del optimizer.state[net.bias]
    state.restore(snapshot)
    assert (optimizer_bytes(optimizer), places(optimizer)) == (before, where)


def test_groups_stay_the_same_dicts_with_all_their_settings() -> None:
    net, optimizer, state = adam()
    snapshot = state.capture()
    group = optimizer.param_groups[0]
    params = group["params"]
    group.update(lr=9.0, betas=(0.1, 0.2), weight_decay=0.3, new_setting=1)
    group["params"] = [net.weight]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    state.restore(snapshot)
    assert optimizer.param_groups == [group]
    assert optimizer.param_groups[0] is group
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.001, (0.9, 0.999), 0)
    assert group["params"] is params
    assert "new_setting" not in group


def test_learning_rate_that_is_a_tensor_goes_back_in_place() -> None:
    weight = nn.Parameter(torch.ones(2))
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([weight], lr=rate)
    state = TrainingState(None, optimizer)
    for take, back in ((state.capture, state.restore), (state.mark, state.go_back)):
        kept = take()
        rate.mul_(0.5)
        back(kept)
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == torch.tensor(0.1).item()


class Slow(Optimizer):
    """An optimizer around another one, as Lookahead is."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.steps = inner, 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.inner.step()


def test_optimizer_inside_an_optimizer_goes_back() -> None:
    net, inner, _ = adam()
    optimizer = Slow(inner)
    before = optimizer_bytes(inner)
    state = TrainingState(net, optimizer)
    snapshot = state.capture()
    optimizer.step()
    state.restore(snapshot)
    assert optimizer_bytes(inner) == before
    assert optimizer.steps == 0


def test_bad_optimizer_state_is_refused_by_name() -> None:
    net, optimizer, state = adam()
    optimizer.state[net.bias]["exp_avg"][0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"optimizer\.bias\.exp_avg") as caught:
        state.capture()
    assert caught.value.report is not None
    assert caught.value.report.location == "optimizer.bias.exp_avg"


def test_hooks_of_an_optimizer_stay() -> None:
    _, optimizer, state = adam()
    snapshot = state.capture()
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    state.restore(snapshot)
    optimizer.step()
    assert calls == [1]
