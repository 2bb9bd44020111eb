"""What a clipper has learnt can be kept, put back and undone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import stayfinite
from stayfinite.errors import ConfigError
from stayfinite.prevent.clipping import AdaptiveClipper, Mode, PerTensor

MODES: tuple[Mode, ...] = ("robust", "percentile", "zscore", "per_unit", "per_tensor")
every_mode = pytest.mark.parametrize("mode", MODES)
learning_mode = pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "per_unit"])


class Job:
    """A small training whose batches are known by their number."""

    def __init__(self, mode: Mode) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.clipper = AdaptiveClipper(self.model, mode, drop="nothing")

    def step(self, number: int, *, poison: float = 1.0) -> None:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        size = 100.0 if number % 30 == 29 else 1.0
        self.optimizer.zero_grad()
        loss = size * (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if poison != 1.0:
            for param in self.model.parameters():
                assert param.grad is not None
                param.grad.mul_(poison)
        self.clipper.clip()
        self.optimizer.step()

    def bytes(self) -> list[bytes]:
        """All that training has come to."""
        tensors = [param.detach() for param in self.model.parameters()]
        state = self.clipper.state_dict()
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
        plain = repr([value for value in state.values() if not isinstance(value, Tensor)])
        return [tensor.numpy().tobytes() for tensor in tensors] + [plain.encode()]


@every_mode
def test_loaded_state_goes_on_as_if_nothing_had_happened(mode: Mode) -> None:
    whole, first, second = Job(mode), Job(mode), Job(mode)
    for number in range(150):
        whole.step(number)
    for number in range(70):
        first.step(number)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.clipper.load_state_dict(first.clipper.state_dict())
    for number in range(70, 150):
        second.step(number)
    assert second.bytes() == whole.bytes()


@every_mode
def test_state_is_a_copy(mode: Mode) -> None:
    job = Job(mode)
    for number in range(5):
        job.step(number)
    state, before = job.clipper.state_dict(), job.bytes()
    for value in state.values():
        if isinstance(value, Tensor):
            value.fill_(7)
    assert job.bytes() == before


@learning_mode
def test_checkpoint_carries_what_was_learnt(mode: Mode, tmp_path: Path) -> None:
    first, second = Job(mode), Job(mode)
    for number in range(40):
        first.step(number)
    file = tmp_path / "run.ckpt"
    parts = (first.model, first.optimizer, [first.clipper])
    stayfinite.save_checkpoint(file, model=parts[0], optimizer=parts[1], scheduler=parts[2])
    stayfinite.load_checkpoint(
        file, model=second.model, optimizer=second.optimizer, scheduler=[second.clipper]
    )
    assert second.bytes() == first.bytes()


@learning_mode
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_step_that_a_guard_undoes_is_not_learnt_from(mode: Mode, poison: float) -> None:
    plain, guarded = Job(mode), Job(mode)
    for number in range(40):
        if number != 20:
            plain.step(number)
    with stayfinite.watch(
        guarded.model, guarded.optimizer, scheduler=guarded.clipper, sinks=[]
    ) as guard:
        for number in range(40):
            guarded.step(number, poison=poison if number == 20 else 1.0)
    assert len(guard.incidents) == 1
    assert guarded.bytes() == plain.bytes()


@learning_mode
def test_rewind_takes_back_what_was_learnt(mode: Mode) -> None:
    job = Job(mode)
    config = stayfinite.RecoveryConfig(primary_strategy="rewind", snapshot_every=1)
    with stayfinite.watch(
        job.model, job.optimizer, scheduler=job.clipper, config=config, sinks=[]
    ) as guard:
        learnt = []
        for number in range(12):
            learnt.append(job.bytes())
            guard.step(lambda n: job.step(n, poison=math.nan if n == 8 else 1.0), number)
            if number == 8:
                assert job.bytes() in learnt
    assert guard.incidents[0].outcome is not None
    assert guard.incidents[0].outcome.strategy == "rewind"


def test_snapshot_does_not_copy_the_parameters_for_the_clipper() -> None:
    """They are the model's; a clipper that was walked into would bring all of them along."""
    job = Job("per_tensor")
    assert not hasattr(job.clipper, "__dict__")
    state = stayfinite.TrainingState(None, None, scheduler=job.clipper)
    assert state.members.census().items == []


@learning_mode
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_bad_numbers_in_a_loaded_state_are_left_out(mode: Mode, bad: float) -> None:
    job = Job(mode)
    for number in range(40):
        job.step(number)
    state = job.clipper.state_dict()
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            value.view(-1)[:3] = bad
        elif isinstance(value, float):
            state[key] = bad
    job.clipper.load_state_dict(state)
    for number in range(40, 80):
        job.step(number)
    limits = list(job.clipper.thresholds.values()) or [job.clipper.threshold]
    assert all(0 < limit < math.inf for limit in limits)


def test_state_of_another_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="the state is of mode 'zscore', and this clipper has"):
        Job("robust").clipper.load_state_dict(Job("zscore").clipper.state_dict())


def test_state_of_another_window_is_refused_where_it_matters() -> None:
    weight = nn.Parameter(torch.zeros(1))
    state = AdaptiveClipper(weight, PerTensor(window=8)).state_dict()
    with pytest.raises(ConfigError, match="window of 8 norms, and this clipper one of 64"):
        AdaptiveClipper(weight, "per_tensor").load_state_dict(state)


def test_tensors_that_come_later_get_a_limit_of_their_own() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    clipper = AdaptiveClipper([first, second], PerTensor(warmup=5, max_norm=1.0))
    random = np.random.default_rng(0)
    for step in range(40):
        first.grad = torch.full((2,), float(random.uniform(0.1, 0.2)))
        if step >= 20:
            second.grad = torch.full((2,), 1e-3)
        clipper.clip()
    thresholds: dict[str, Any] = clipper.thresholds
    assert 0.1 < thresholds["0"] < 0.5
    assert thresholds["1"] == pytest.approx(1.05 * 1e-3 * 2**0.5, rel=1e-3)
