"""Warnings of torch name the same place with our wrappers around as without."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import stayfinite

Place = tuple[str, int]


class Longer(IterableDataset[Tensor]):
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(5, 3))


def duplicated(model: nn.Module) -> None:
    twice = [model.weight, model.weight]
    torch.optim.SGD(twice, lr=0.1)


def loaded_beyond_its_length(model: nn.Module) -> None:
    loader = DataLoader(Longer())
    len(loader)
    for _ in loader:
        pass


def with_a_scaler(model: nn.Module) -> None:
    class Scaled(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
            super().step(closure)

    optimizer, scaler = Scaled(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    scaler.step(optimizer)


def order_of_a_schedule(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scheduler.step()


def places(act: Any) -> list[Place]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(model)
        model.zero_grad()
    return [(each.filename, each.lineno) for each in caught]


ACTS = [duplicated, loaded_beyond_its_length, with_a_scaler, order_of_a_schedule]


@pytest.mark.parametrize("act", ACTS)
def test_a_warning_names_the_place_that_it_names_without_us(act: Any) -> None:
    watched = nn.Linear(3, 1)
    plain = places(act)
    assert plain
    with stayfinite.watch(watched, torch.optim.SGD(watched.parameters(), lr=0.1), sinks=[]):
        assert places(act) == plain
