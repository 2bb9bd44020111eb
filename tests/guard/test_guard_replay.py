"""A framework's step that can be called again: the operation is found, the bytes stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stayfinite
from stayfinite import Guard
from stayfinite.explain.experiments import CannotReplayError
from stayfinite.guard.replay import Replay


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.noise = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.noise(self.norm(self.inner(x))).square().sum(1) + x[:, 0])


class Loop:
    """A loop of a framework: `micro` forward and backward passes, then one update."""

    def __init__(self, *, micro: int = 1, replays: bool = True, prove_seconds: float = 0.0) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.micro, self.replays, self.prove_seconds = micro, replays, prove_seconds
        self.under_way: list[Tensor] = []
        self.calls = 0

    def run(
        self, batches: list[Tensor], *, before_replay: Callable[[], None] | None = None
    ) -> Guard:
        with stayfinite.watch(
            self.net, self.optimizer, again="never", sinks=[], prove_seconds=self.prove_seconds
        ) as guard:
            if self.replays:

                def again(_: Any) -> None:
                    if before_replay is not None:
                        before_replay()
                    for batch in self.under_way:
                        self.pass_over(batch)

                guard.replay_with(Replay(guard, again))
            for number, batch in enumerate(batches):
                self.under_way.append(batch)
                self.pass_over(batch)
                if number % self.micro == self.micro - 1:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.under_way.clear()
        return guard

    def pass_over(self, batch: Tensor) -> None:
        self.calls += 1
        self.net(batch).mean().backward()

    def bytes(self) -> list[bytes]:
        values = [*self.net.state_dict().values(), torch.get_rng_state()]
        return [value.numpy().tobytes() for value in values]


def batches(bad: int | None, count: int = 8) -> list[Tensor]:
    torch.manual_seed(1)
    made = [torch.rand(6, 4) + 1 for _ in range(count)]
    if bad is not None:
        made[bad][2] = -100.0
    return made


@pytest.mark.parametrize("micro", [1, 2])
def test_operation_is_found_and_nothing_else_changes(micro: int) -> None:
    bad = 5
    loop, other = Loop(micro=micro), Loop(micro=micro, replays=False)
    guard = loop.run(batches(bad))
    vetoed = other.run(batches(bad))
    (incident,) = guard.incidents
    assert incident.origin is not None
    assert incident.origin.op == "aten.log.default"
    assert incident.origin.module == ""
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "log_of_negative"
    assert incident.step == vetoed.incidents[0].step
    assert loop.bytes() == other.bytes()
    assert loop.calls == other.calls + micro


def test_step_that_does_not_repeat_is_called_transient() -> None:
    loop = Loop()
    made = batches(None)
    good = made[3].clone()
    made[3][0] = math.nan

    def mend() -> None:
        loop.under_way[-1].copy_(good)

    guard = loop.run(made, before_replay=mend)
    (incident,) = guard.incidents
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "transient_fault"


def test_replay_that_raises_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("the framework will not")

    loop, other = Loop(), Loop(replays=False)
    guard = loop.run(batches(5), before_replay=fails)
    other.run(batches(5))
    assert len(guard.incidents) == 1
    assert "could not be replayed" in caplog.text
    assert loop.bytes() == other.bytes()


def test_step_that_cannot_be_replayed_stays_as_it_was_noticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def cannot() -> None:
        raise CannotReplayError("its loss is not known here")

    loop, other = Loop(), Loop(replays=False)
    guard = loop.run(batches(5), before_replay=cannot)
    plain = other.run(batches(5))
    (incident,), (noticed,) = guard.incidents, plain.incidents
    assert (incident.origin, incident.diagnosis) == (noticed.origin, noticed.diagnosis)
    assert caplog.text == ""
    assert loop.bytes() == other.bytes()


def test_job_knows_whether_its_last_update_was_good() -> None:
    loop = Loop()
    seen: list[bool] = []
    with stayfinite.watch(loop.net, loop.optimizer, sinks=[]) as guard:
        (job,) = guard.jobs.values()
        loop.optimizer.register_step_post_hook(lambda *_: seen.append(job.was_good))
        for number, batch in enumerate(batches(2, count=4)):
            loop.optimizer.zero_grad()
            loop.pass_over(batch)
            loop.optimizer.step()
            assert len(seen) == number + 1
    assert seen == [True, True, False, True]


def test_experiments_on_a_step_of_a_framework_leave_the_bytes_as_they_are() -> None:
    loop, other = Loop(prove_seconds=30.0), Loop(replays=False)
    guard = loop.run(batches(5))
    other.run(batches(5))
    (incident,) = guard.incidents
    assert incident.diagnosis is not None
    assert incident.diagnosis.confidence == "proven"
    assert any("kept inside its domain" in said for said in incident.diagnosis.evidence)
    assert loop.bytes() == other.bytes()
