"""Weights that an update makes bad: the steps before it are run again, as if it had not been."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stayfinite
from stayfinite import Guard, RecoveryConfig


class Training:
    """Dropout, BatchNorm, Adam, a schedule and an average; update `harm` spoils a weight once.

    By its arithmetic, since its moments are absurd then, or after it, as a fault of memory would.
    """

    def __init__(
        self, *, harm: int | None = None, micro: int = 1, by_arithmetic: bool = True
    ) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.harm, self.micro = harm, micro
        self.by_arithmetic = by_arithmetic
        self.updates = 0

    def update(self) -> None:
        is_bad = self.updates == self.harm
        self.updates += 1
        if is_bad:
            self.harm = None
        if is_bad and self.by_arithmetic:
            self.optimizer.state[self.net[0].weight]["exp_avg_sq"][1, 2] = -1.0
        self.optimizer.step()
        if is_bad and not self.by_arithmetic:
            with torch.no_grad():
                self.net[0].weight[1, 2] = math.nan

    def watch(self, **options: Any) -> Guard:
        config = RecoveryConfig(primary_strategy="skip", snapshot_every=4, **options)
        return stayfinite.watch(
            self.net,
            self.optimizer,
            scheduler=self.schedule,
            ema=self.average,
            config=config,
            sinks=[],
        )

    def step(self, batch: tuple[int, Tensor]) -> float:
        number, x = batch
        loss = self.net(x).square().mean()
        loss.backward()
        if number % self.micro == self.micro - 1:
            self.update()
            self.schedule.step()
            self.average.update_parameters(self.net)
            self.optimizer.zero_grad()
        return loss.item()

    def bytes(self) -> list[bytes]:
        tensors = [*self.net.state_dict().values(), *self.average.state_dict().values()]
        for state in self.optimizer.state.values():
            tensors += state.values()
        return [tensor.numpy().tobytes() for tensor in tensors] + [
            repr(self.schedule.state_dict()).encode()
        ]


def batches(count: int) -> list[tuple[int, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(number, torch.randn(6, 4, generator=generator)) for number in range(count)]


@pytest.mark.parametrize("by_arithmetic", [True, False])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("harm", [1, 3, 4, 6])
def test_harm_of_one_update_is_as_if_its_batches_had_not_been(
    harm: int, micro: int, by_arithmetic: bool
) -> None:
    training = Training(harm=harm, micro=micro, by_arithmetic=by_arithmetic)
    given = batches(12 * micro)
    with training.watch() as guard:
        results = [guard.step(training.step, batch) for batch in given]
    noticed = harm if by_arithmetic else harm + 1
    left_out = [(noticed + 1) * micro - 1]
    if noticed % 4 == 0 and not by_arithmetic:  # by the next snapshot, before the step begins
        noticed, left_out = -1, []
    other = Training(micro=micro)
    with other.watch() as clean:
        for number, batch in enumerate(given):
            if number // micro != noticed:
                clean.step(other.step, batch)
    assert len(guard.incidents) == 1
    assert [step for step, result in enumerate(results) if result is None] == left_out
    assert training.bytes() == other.bytes()


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is one whose parameters are looked at in turns."""
    monkeypatch.setattr("stayfinite.guard.job._LARGE", 0)


@pytest.mark.parametrize("harm", [1, 2, 3, 5, 6])
def test_harm_in_a_large_model_is_noticed_by_the_next_loss(large: None, harm: int) -> None:
    training, given = Training(harm=harm), batches(12)
    with training.watch() as guard:
        results = [guard.step(training.step, batch) for batch in given]
    noticed = harm + 1
    is_seen_by_snapshot = noticed % 4 == 0
    other = Training()
    with other.watch() as clean:
        for number, batch in enumerate(given):
            if is_seen_by_snapshot or number != noticed:
                clean.step(other.step, batch)
    assert len(guard.incidents) == 1
    assert results.count(None) == (0 if is_seen_by_snapshot else 1)
    assert training.bytes() == other.bytes()


@pytest.mark.parametrize("harm", [1, 2, 5, 6])
def test_a_batch_that_harms_each_time_is_left_out_and_its_neighbours_are_not(
    large: None, harm: int
) -> None:
    given = batches(12)

    def stepped(training: Training, batch: tuple[int, Tensor]) -> float:
        loss = training.step(batch)
        if batch[0] == harm:
            with torch.no_grad():
                training.net[3].bias.fill_(math.inf)
        return loss

    training, other = Training(), Training()
    for each in (training, other):
        each.net[2].p = 0.0  # later steps keep the random numbers that they had
    with training.watch() as guard:
        for batch in given:
            guard.step(lambda each: stepped(training, each), batch)
    assert len(guard.incidents) == 1
    skipped = {harm} if (harm + 1) % 4 == 0 else {harm, harm + 1}
    with other.watch() as clean:
        for batch in given:
            if batch[0] not in skipped:
                clean.step(other.step, batch)
    assert training.bytes() == other.bytes()


def test_loop_that_is_not_ours_keeps_schedule_and_average_of_the_snapshot() -> None:
    training = Training(harm=5)
    with training.watch() as guard:
        for batch in batches(5):
            training.step(batch)
        training.step(batches(6)[5])
        rate = training.optimizer.param_groups[0]["lr"]
        training.step(batches(7)[6])
    assert len(guard.incidents) == 1
    assert "was put back" in str(guard.incidents[0].outcome)
    assert all(value.isfinite().all() for value in training.average.state_dict().values())
    assert rate == pytest.approx(0.01 * 0.9**5)  # that of the snapshot, and what came after
    assert training.schedule.last_epoch == 5  # 4 at the snapshot, then that of the next step


def test_batches_that_were_written_into_are_not_run_again() -> None:
    training = Training(harm=6)

    def step(batch: tuple[int, Tensor]) -> float:
        loss = training.step(batch)
        batch[1].zero_()
        return loss

    with training.watch() as guard:
        for batch in batches(6):
            guard.step(step, batch)
        assert guard.step(step, batches(7)[6]) is None
    assert len(guard.incidents) == 1
    assert all(value.isfinite().all() for value in training.net.state_dict().values())


def test_overflow_that_a_scaler_absorbs_is_no_harm() -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with stayfinite.watch(training.net, training.optimizer, scaler=scaler, sinks=[]) as guard:

        def step(batch: tuple[int, Tensor]) -> None:
            scaler.scale(training.net(batch[1]).square().mean() * 8).backward()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()

        for batch in batches(3):
            guard.step(step, batch)
    assert guard.incidents == []
    assert scaler.get_scale() < 2.0**127


class MeanOfGroups(nn.Module):
    """Keeps the mean of each group in a buffer; one without a member has a mean of 0 / 0."""

    means: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("means", torch.zeros(2))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        out = self.scale * (x - self.means[group])
        members = [x[group == each] for each in (0, 1)]
        self.means = torch.stack([each.sum() / len(each) for each in members]).detach()
        return out.square().mean()


def test_a_buffer_that_an_earlier_step_has_left_bad_is_put_back() -> None:
    """Its step was finite, so that the next one is bad; to skip that changes nothing."""
    net = MeanOfGroups()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    config = RecoveryConfig(primary_strategy="skip", snapshot_every=4)
    guard = stayfinite.watch(net, optimizer, config=config, sinks=[])
    for step in range(12):
        group = torch.zeros(4, dtype=torch.long) if step == 6 else torch.arange(4) % 2
        optimizer.zero_grad()
        net(torch.arange(4.0), group).backward()
        optimizer.step()
    guard.close()
    assert [incident.step for incident in guard.incidents] == [7]
    assert "the state of 3 good steps before was put back" in guard.incidents[0].outcome.detail
    assert net.means.isfinite().all()
    assert net.mask.isneginf().any()  # it is so on purpose
