"""Recovery follows the cause: what a bad sample, a lost range and a divergence lead to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from kept_steps import TRAININGS, rows_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import stayfinite
from stayfinite.recover.config import UNATTENDED, RecoveryConfig

PLAIN = RecoveryConfig(
    primary_strategy="skip", fallback_strategy="skip", max_consecutive_nans=10**6, quarantine=False
)
NAN = float("nan")


def table(bad: range | list[int], rows: int = 64) -> TensorDataset:
    torch.manual_seed(1)
    x = torch.randn(rows, 3)
    x[list(bad), 1] = NAN
    return TensorDataset(x, torch.randn(rows, 1))


def trained(
    loader: Any, *, config: RecoveryConfig, epochs: int = 1
) -> tuple[stayfinite.Guard, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with stayfinite.watch(model, optimizer, config=config, sinks=[]) as guard:
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
    return guard, model, optimizer


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def test_samples_in_a_row_cost_their_own_steps_and_nothing_else() -> None:
    loader = DataLoader(table(range(24, 40)), batch_size=1)
    guard, model, optimizer = trained(loader, config=UNATTENDED)
    _, plain, _ = trained(loader, config=PLAIN)
    assert [each.outcome.strategy for each in guard.incidents if each.outcome] == ["skip"] * 16
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert all(map(torch.equal, weights(model), weights(plain)))


def test_a_bad_sample_is_not_read_again() -> None:
    loader = DataLoader(table([17, 40]), batch_size=8)
    guard, _, _ = trained(loader, config=UNATTENDED, epochs=3)
    assert [each.step for each in guard.incidents] == [2, 5]
    assert guard.quarantine == {"TensorDataset": [17, 40]}
    assert "sample 17 of TensorDataset is not read again" in str(guard.incidents[0].outcome)


def test_batches_keep_their_size_without_the_sample() -> None:
    data, sizes = table([17]), []

    class Sized(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                sizes.append((len(batch[0]), bool(batch[0].isfinite().all())))
                yield batch

    trained(Sized(data, batch_size=8), config=UNATTENDED, epochs=2)
    assert sizes == [(8, number != 2) for number in range(16)]


def test_a_batch_of_nothing_else_is_not_read_again() -> None:
    guard, model, _ = trained(DataLoader(table([3]), batch_size=1), config=UNATTENDED, epochs=3)
    assert [each.step for each in guard.incidents] == [3]
    assert guard.steps == 64 + 63 + 63
    assert all(value.isfinite().all() for value in weights(model))


def test_samples_of_a_subset_are_those_of_the_dataset() -> None:
    subset = Subset(table([17]), list(range(10, 26)))
    guard, _, _ = trained(DataLoader(subset, batch_size=4), config=UNATTENDED, epochs=2)
    assert guard.quarantine == {"TensorDataset": [17]}
    assert len(guard.incidents) == 1


def test_workers_are_not_asked_for_it_either() -> None:
    loader = DataLoader(table([17]), batch_size=8, num_workers=1)
    guard, _, _ = trained(loader, config=UNATTENDED, epochs=2)
    assert len(guard.incidents) == 1


def test_without_quarantine_it_comes_again() -> None:
    config = dataclasses.replace(UNATTENDED, quarantine=False)
    guard, _, _ = trained(DataLoader(table([17]), batch_size=8), config=config, epochs=2)
    assert len(guard.incidents) == 2
    assert guard.quarantine == {}


class Rows(Dataset[Any]):
    """Rows of which one is all zeros: its norm has no gradient, and no logarithm."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(3) if index == 5 else torch.full((3,), 1.0 + index)


@pytest.mark.parametrize(
    ("function", "steps"), [(torch.log, [1, 5]), (torch.sqrt, [1])], ids=["value", "derivative"]
)
def test_a_sample_with_a_singular_value_is_set_aside(function: Any, steps: list[int]) -> None:
    """At once where the value is finite and only its derivative is not, else the second time."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with stayfinite.watch(model, optimizer, config=UNATTENDED, sinks=[]) as guard:
        loader = DataLoader(Rows(), batch_size=4)
        for _ in range(4):
            for x in loader:
                optimizer.zero_grad()
                function(model(x).square().sum(1)).mean().backward()
                optimizer.step()
    assert [each.step for each in guard.incidents] == steps
    assert guard.quarantine == {"Rows": [5]}


def test_a_dataset_that_is_healthy_is_asked_as_ever() -> None:
    asked: list[int] = []

    class Noted(Rows):
        def __getitem__(self, index: int) -> Tensor:
            asked.append(index)
            return torch.ones(3)

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with stayfinite.watch(model, optimizer, config=UNATTENDED, sinks=[]):
        for x in DataLoader(Noted(), batch_size=4):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert asked == list(range(16))


def test_a_library_that_sets_the_rate_back_is_noticed() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    x, y = torch.randn(16, 3), torch.randn(16, 1)
    with stayfinite.watch(model, optimizer, config=UNATTENDED, sinks=[]) as guard:
        for _ in range(120):
            for group in optimizer.param_groups:
                group["lr"] = 3.0
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    said = [str(each.outcome) for each in guard.incidents]
    assert sum("set the learning rate back to 3" in each for each in said) == 1
    assert sum("strategy='lower_lr'" in each for each in said) == 1


@pytest.mark.parametrize("config", [UNATTENDED, PLAIN], ids=["by cause", "plain"])
def test_half_of_the_samples_may_be_bad(config: RecoveryConfig) -> None:
    loader = DataLoader(table(range(0, 64, 2)), batch_size=1)
    guard, _, optimizer = trained(loader, config=config)
    assert len(guard.incidents) == 32
    assert optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("number", [2, 3])
def test_no_fewer_good_steps_are_kept_than_with_plain_skipping(number: int) -> None:
    plain, ours = rows_of(TRAININGS[number])
    assert ours.kept >= plain.kept
    assert ours.is_useful
