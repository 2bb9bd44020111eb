"""Flipped bits are told from bugs: the step is run again, and was finite, or not."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from injections import Job
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stayfinite
from stayfinite.guard import loop_replay
from stayfinite.records import Incident
from stayfinite.testing import inject

IS_PROOF = settings.default.max_examples >= 5_000
FLIPS, BUGS = (1_000, 200) if IS_PROOF else (24, 24)
AT = 2
TARGETS: list[dict[str, Any]] = [
    *({"module": name} for name in ("embed", "norm", "head")),
    *({"op": name} for name in ("relu", "log", "softmax", "mul", "native_batch_norm")),
    *({"gradient": name} for name in ("embed.weight", "norm.weight", "head.weight", "head.bias")),
    *({"loss": True}, {"inputs": True}),
]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, there is time to run a step again."""
    monkeypatch.setattr(loop_replay, "_MOST_SECONDS", 300.0)


def flipped(number: int, *, ours: bool, target: dict[str, Any]) -> tuple[Job, list[Incident]]:
    """A training with one flipped bit, and what was found."""
    job = Job()
    flip = inject(
        job.model,
        job.optimizer,
        value="bitflip",
        seed=number,
        at_step=AT,
        must_fire=False,
        **target,
    )
    with stayfinite.watch(job.model, job.optimizer, sinks=[]) as guard, flip:
        for batch in DataLoader(job.batches, batch_size=None):  # type: ignore[arg-type]
            if ours:
                guard.step(job.step, batch)
            else:
                job.step(batch)
    return job, guard.incidents


def clean() -> dict[str, bytes]:
    job = Job()
    for batch in DataLoader(job.batches, batch_size=None):  # type: ignore[arg-type]
        job.step(batch)
    return job.bytes()


@pytest.mark.parametrize("ours", [True, False])
def test_flipped_bits_are_called_transient(ours: bool) -> None:
    """Those that give a non-finite value; the step is computed again: nothing is left of them."""
    reference, found, number = clean(), 0, 0
    while found < FLIPS // 2:
        number += 1
        chance = random.Random(number)
        job, incidents = flipped(number, ours=ours, target=chance.choice(TARGETS))
        if not incidents:
            continue  # the value was finite after all
        found += 1
        causes = [each.diagnosis and each.diagnosis.cause for each in incidents]
        assert causes == ["transient_fault"], (number, incidents)
        assert job.bytes() == reference, number


class Buggy(nn.Module):
    """Finite until a batch has a row that its function does not bear."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.drop, self.function = nn.Linear(4, 4), nn.Dropout(0.2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.drop(self.function(x)))


# A function, and a value that it does not bear, forward or backward.
BUGGY: list[tuple[Callable[[Tensor], Tensor], float]] = [
    (torch.log, 0.0),
    (torch.log, -1.0),
    (torch.sqrt, -1.0),
    (lambda x: x / x.sum(1, keepdim=True), 0.0),
    (lambda x: x / x.norm(dim=1, keepdim=True), 0.0),
    (torch.exp, 100.0),
    (torch.reciprocal, 0.0),
    (lambda x: torch.acos(x / 4), 8.0),
    (lambda x: x**0.5, -2.0),
    (lambda x: torch.log(torch.softmax(x, 1)), float("-inf")),
    (lambda x: x, float("nan")),
    (lambda x: torch.nn.functional.dropout(x, 0.4) * torch.rsqrt(x), 0.0),
    (lambda x: (torch.rand_like(x) + x) * torch.digamma(x), 0.0),
    (lambda x: torch.cumprod(x, 1), 1e10),
]


def buggy(number: int, *, ours: bool) -> list[Incident]:
    """What was found in a training with a bug."""
    chance = random.Random(number)
    function, value = chance.choice(BUGGY)
    torch.manual_seed(number)
    model = Buggy(function)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = [torch.rand(chance.randint(2, 6), 4) + 0.5 for _ in range(5)]
    batches[chance.randrange(5)][chance.randrange(2)] = value

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

    with stayfinite.watch(model, optimizer, sinks=[]) as guard:
        for x in DataLoader(batches, batch_size=None):  # type: ignore[arg-type]
            if ours:
                guard.step(step, x)
            else:
                step(x)
    return guard.incidents


@pytest.mark.parametrize("ours", [True, False])
def test_no_bug_is_called_transient(ours: bool) -> None:
    for number in range(BUGS // 2):
        incidents = buggy(number, ours=ours)
        assert incidents, number
        causes = [each.diagnosis and each.diagnosis.cause for each in incidents]
        assert "transient_fault" not in causes, (number, incidents)


@pytest.mark.parametrize("ours", [True, False])
def test_a_step_that_does_not_repeat_by_itself_is_said_not_to(ours: bool) -> None:
    """Its noise comes from where no state can be put back."""
    noise = functools.partial(random.SystemRandom().uniform, 0.5, 1.5)
    times = iter([1.0, 1.0, float("nan")])
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (model(x) * noise() * next(times, 1.0)).square().mean().backward()
        optimizer.step()

    with stayfinite.watch(model, optimizer, sinks=[]) as guard:
        for x in DataLoader(list(torch.rand(4, 3, 4)), batch_size=None):  # type: ignore[arg-type]
            if ours:
                guard.step(step, x)
            else:
                step(x)
    (incident,) = guard.incidents
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "unknown"
    assert "is not reproducible" in incident.diagnosis.why
