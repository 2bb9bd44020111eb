"""Experiments on steps that are ours: guilty samples, proof, and bytes that stay."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stayfinite
from stayfinite import Guard, RecoveryConfig
from stayfinite.records import Diagnosis

LONG = 60.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.noise = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.noise(self.norm(self.inner(x))).sum(1)


class Training:
    """A loop with all that has state: batch norm, dropout, Adam, a schedule, an average."""

    def __init__(self, loss: Callable[[Tensor, Any], Tensor] | None = None) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.ema = torch.optim.swa_utils.AveragedModel(self.net)
        self.loss = loss if loss is not None else lambda out, batch: out.square().mean()
        self.calls = 0

    def step(self, batch: Any) -> None:
        self.calls += 1
        self.optimizer.zero_grad()
        x = batch if isinstance(batch, Tensor) else inputs_of(batch)
        self.loss(self.net(x), batch).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.ema.update_parameters(self.net)

    def run(self, batches: Any, *, seconds: float = LONG) -> Guard:
        with stayfinite.watch(
            self.net,
            self.optimizer,
            scheduler=self.scheduler,
            ema=self.ema,
            sinks=[],
            prove_seconds=seconds,
        ) as guard:
            for batch in batches:
                guard.step(self.step, batch)
        return guard

    def bytes(self) -> list[bytes]:
        states = [*self.net.state_dict().values(), *self.ema.state_dict().values()]
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        values = [*states, *moments, torch.get_rng_state()]
        return [value.detach().numpy().tobytes() for value in values]


def inputs_of(batch: Any) -> Tensor:
    if dataclasses.is_dataclass(batch):
        return batch.x
    return batch["x"] if hasattr(batch, "keys") else batch[0]


def tensors(bad: dict[int, list[int]], *, value: float = float("nan")) -> list[Tensor]:
    torch.manual_seed(1)
    made = [torch.rand(16, 4) + 1 for _ in range(5)]
    for number, rows in bad.items():
        for row in rows:
            made[number][row, 1] = value
    return made


def first(guard: Guard) -> Diagnosis:
    diagnosis = guard.incidents[0].diagnosis
    assert diagnosis is not None
    return diagnosis


@pytest.mark.parametrize("rows", [[5], [0], [15], [3, 11]])
def test_guilty_rows_of_bad_data_are_named_and_proven(rows: list[int]) -> None:
    found = first(Training().run(tensors({2: rows})))
    assert found.cause == "bad_input_data"
    assert found.confidence == "proven"
    names = " and ".join(map(str, rows))
    assert any(f"{names} of the batch go" in sentence for sentence in found.evidence)


def test_training_goes_on_to_the_byte_as_without_experiments() -> None:
    plain, proving = Training(), Training()
    plain.run(tensors({1: [4], 3: [2, 9]}), seconds=0.0)
    proving.run(tensors({1: [4], 3: [2, 9]}))
    assert proving.calls > plain.calls + 20
    assert proving.bytes() == plain.bytes()


def test_healthy_training_is_the_same_to_the_byte() -> None:
    without, watched = Training(), Training()
    for batch in tensors({}):
        without.step(batch)
    watched.run(tensors({}))
    assert (watched.calls, watched.bytes()) == (without.calls, without.bytes())


def test_without_seconds_nothing_is_run() -> None:
    training = Training()
    guard = training.run(tensors({2: [5]}), seconds=0.0)
    assert first(guard).confidence == "likely"
    assert training.calls <= 5 + 3


def test_a_guard_inside_the_domain_proves_the_operation() -> None:
    def loss(out: Tensor, batch: Any) -> Tensor:
        return out.square().mean() + torch.log(batch[:, 1] - 0.5).mean()

    found = first(Training(loss).run(tensors({2: [7]}, value=0.5)))
    assert (found.cause, found.confidence) == ("log_of_zero", "proven")
    assert any("row 7 of the batch goes bad alone" in said for said in found.evidence)


def test_precision_is_proven_by_more_of_it() -> None:
    def loss(out: Tensor, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return (batch @ torch.full((4, 1), 300.0)).float().mean() * 1e-6 + out.square().mean()

    found = first(Training(loss).run(tensors({2: [7]}, value=900.0)))
    assert any(said == "in float32 the same step is finite" for said in found.evidence)


def test_a_failure_of_chance_is_not_proven() -> None:
    torch.manual_seed(0)
    chance = iter([False, False, True] + [True, False] * 50)

    def loss(out: Tensor, batch: Any) -> Tensor:
        return torch.log(out.square().mean() * (0.0 if next(chance) else 1.0))

    found = first(Training(loss).run(tensors({})))
    assert found.confidence != "proven"


@dataclasses.dataclass
class Sample:
    x: Tensor
    names: list[str]


class Encoding(UserDict[str, Any]):
    pass


def as_dict(x: Tensor) -> Any:
    return {"x": x, "y": torch.zeros(len(x)), "names": [str(row) for row in range(len(x))]}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x, torch.zeros(len(x))),
        lambda x: [x, torch.zeros(len(x))],
        as_dict,
        lambda x: Encoding(x=x, mask=torch.ones(len(x), 3)),
        lambda x: Sample(x, []),
        lambda x: {"x": x, "deep": {"y": torch.zeros(len(x), 2)}, "scale": torch.tensor(2.0)},
    ],
)
def test_nested_batches_are_split(wrap: Callable[[Tensor], Any]) -> None:
    found = first(Training().run([wrap(x) for x in tensors({2: [5]})]))
    assert any("row 5 of the batch goes bad alone" in said for said in found.evidence)
    assert found.confidence == "proven"


def test_a_batch_that_cannot_be_split_is_said_to_be_so() -> None:
    batches = [(x, torch.zeros(3)) for x in tensors({2: [5]})]
    found = first(Training().run(batches))
    assert any("not searched for a bad sample" in said for said in found.evidence)
    assert found.confidence == "likely"


def test_rows_have_the_numbers_of_their_samples() -> None:
    table = torch.cat(tensors({2: [5]}))
    torch.manual_seed(4)
    loader = DataLoader(TensorDataset(table), batch_size=16, shuffle=True)
    found = first(Training().run(loader))
    assert any("is sample 37 of the dataset TensorDataset" in said for said in found.evidence)


def test_the_budget_is_kept() -> None:
    class Slow(Training):
        def step(self, batch: Any) -> None:
            super().step(batch)
            time.sleep(0.05)

    training = Slow()
    guard = training.run(tensors({2: [5]}), seconds=0.3)
    assert training.calls < 5 + 3 + 8
    assert first(guard).confidence == "likely"


def test_a_step_that_raises_on_small_batches_does_not_break_the_run() -> None:
    def loss(out: Tensor, batch: Any) -> Tensor:
        if len(batch) < 16:
            raise ValueError("the batch is too small")
        return out.square().mean()

    training = Training(loss)
    guard = training.run(tensors({2: [5]}))
    assert len(guard.incidents) == 1
    assert first(guard).confidence == "likely"
    assert all(bool(torch.isfinite(p).all()) for p in training.net.parameters())


def test_an_error_of_ours_is_logged_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("ours")

    monkeypatch.setattr("stayfinite.guard.replay.experiment", broken)
    training, plain = Training(), Training()
    plain.run(tensors({2: [5]}), seconds=0.0)
    with caplog.at_level(logging.WARNING, logger="stayfinite"):
        training.run(tensors({2: [5]}))
    assert "the experiments on a bad step failed" in caplog.text
    assert training.bytes() == plain.bytes()


def test_weights_that_the_step_itself_writes_are_put_back() -> None:
    class Clipped(Training):
        def step(self, batch: Any) -> None:
            super().step(batch)
            with torch.no_grad():
                self.net.inner.weight.clamp_(-0.05, 0.05)

    plain, proving = Clipped(), Clipped()
    plain.run(tensors({2: [5]}), seconds=0.0)
    proving.run(tensors({2: [5]}))
    assert proving.bytes() == plain.bytes()


def test_accumulated_batches_are_not_split() -> None:
    training = Training()
    counter: Iterator[int] = iter(range(1000))

    def step(batch: tuple[int, Tensor]) -> None:
        number, x = batch
        training.net(x).square().mean().backward()
        if number % 2:
            training.optimizer.step()
            training.optimizer.zero_grad()

    with stayfinite.watch(training.net, training.optimizer, sinks=[], prove_seconds=LONG) as guard:
        for x in tensors({2: [5]}):
            guard.step(step, (next(counter), x))
    assert not any("of the batch" in said for said in first(guard).evidence)
    assert any("went bad the same way" in said for said in first(guard).evidence)


def test_a_term_whose_gradient_alone_is_bad_is_named() -> None:
    def loss(out: Tensor, batch: Any) -> Tensor:
        near = out - out.detach() + batch[:, 1] - 0.5
        size = near.square().mean()
        root = torch.sqrt(near.abs()).mean()
        return size + 0.1 * root

    found = first(Training(loss).run(tensors({2: [7]}, value=0.5)))
    said = "of the terms of the loss, root goes bad alone, and size alone is finite"
    assert said in found.evidence


def test_one_place_is_not_examined_again_and_again() -> None:
    training = Training()
    guard = training.run([*tensors({1: [1], 3: [2]}), *tensors({1: [3], 3: [4], 4: [5]})])
    found = [each.diagnosis.confidence for each in guard.incidents if each.diagnosis]
    assert found == ["proven", "proven", "proven", "likely", "likely"]


class Diverging(Training):
    """A rate so high that the loss overflows after some steps."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.net.norm = nn.Identity()  # type: ignore[assignment]
        self.net.noise = nn.Identity()  # type: ignore[assignment]
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=rate)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.ema = torch.optim.swa_utils.AveragedModel(self.net)


def diverged(rate: float, *, seconds: float) -> tuple[Diverging, Guard]:
    training = Diverging(rate)
    config = stayfinite.RecoveryConfig(snapshot_every=40, snapshot_slots=2)
    batch = tensors({})[0]
    guard = stayfinite.watch(
        training.net,
        training.optimizer,
        scheduler=training.scheduler,
        ema=training.ema,
        sinks=[],
        config=config,
        prove_seconds=seconds,
    )
    with guard:
        for _ in range(200):
            guard.step(training.step, batch)
            if guard.incidents:
                break
    return training, guard


def test_steps_before_are_run_again_with_a_lower_rate() -> None:
    training, guard = diverged(3.0, seconds=LONG)
    plain, _ = diverged(3.0, seconds=0.0)
    found = first(guard)
    assert any("with a tenth of the learning rate over the last" in said for said in found.evidence)
    assert found.confidence != "proven"
    assert training.bytes() == plain.bytes()
    assert [g["lr"] for g in training.optimizer.param_groups] == [
        g["lr"] for g in plain.optimizer.param_groups
    ]


def diverge(*, prove_seconds: float) -> tuple[Guard, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.9)
    config = RecoveryConfig(primary_strategy="skip", snapshot_every=2)
    watch = stayfinite.watch(model, optimizer, config=config, prove_seconds=prove_seconds, sinks=[])
    with watch as guard:
        for _ in range(4):
            x = torch.randn(8, 4) * 3
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return guard, [param.detach().clone() for param in model.parameters()]


def test_earlier_weights_are_tried_in_a_loop_that_is_not_ours_and_put_back() -> None:
    guard, weights = diverge(prove_seconds=20)
    _, plain = diverge(prove_seconds=0)
    diagnosis = guard.incidents[0].diagnosis
    assert diagnosis is not None
    said = diagnosis.evidence
    assert "with the weights of an earlier snapshot the same batch is finite" in said
    assert all(torch.equal(one, two) for one, two in zip(weights, plain, strict=True))
