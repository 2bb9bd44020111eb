"""Which batch is the first bad one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scenes import Net, Unstable, guarded
from torch import Tensor, nn

import stayfinite
from stayfinite.errors import InputError

INPUT = torch.ones(4, 3)


def batches(bad: int | None, count: int = 6) -> list[tuple[Tensor, Tensor]]:
    made = [(torch.ones(2, 3), torch.zeros(2, 1)) for _ in range(count)]
    if bad is not None:
        made[bad][0][1, 2] = math.inf
    return made


@pytest.mark.parametrize("bad", [0, 4])
def test_first_bad_batch_is_given_with_its_place(bad: int, untouched: Any) -> None:
    net = Net()
    is_same = untouched(net)
    loader = batches(bad)
    found = stayfinite.find_first_bad_batch(net, loader, nn.functional.mse_loss)
    assert is_same()
    assert found.index == bad
    assert found.batch is loader[bad]
    assert found.reports[0].location == "inputs.0"
    assert "inputs.0 holds inf values" in found.reason
    assert found.origin.phase == "data"


def test_batch_with_finite_values_is_named_by_the_operation() -> None:
    model = Unstable()
    loader = [torch.ones(4, 3), torch.zeros(4, 3)]
    found = stayfinite.find_first_bad_batch(model, loader)
    assert (found.index, found.reports) == (1, ())
    assert found.reason.startswith("aten.log.default at ")
    assert found.origin.facts["expression"] == "torch.log(x)"


def test_no_bad_batch_is_none_and_leaves_all_as_before(untouched: Any) -> None:
    model = Unstable()
    is_same = untouched(model)
    assert stayfinite.find_first_bad_batch(model, [INPUT, INPUT]) is None
    assert stayfinite.find_first_bad_batch(model, []) is None
    assert is_same()


def test_only_so_many_batches_are_tried() -> None:
    net = Net()
    loss = nn.functional.mse_loss
    assert stayfinite.find_first_bad_batch(net, batches(4), loss, num_batches=4) is None
    assert stayfinite.find_first_bad_batch(net, batches(4), loss, num_batches=5).index == 4
    endless = (pair for _ in iter(int, 1) for pair in batches(None))
    assert stayfinite.find_first_bad_batch(net, endless, loss, num_batches=3) is None


def test_every_batch_is_tried_on_the_same_weights_and_random_numbers() -> None:
    seen: list[float] = []

    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(float(torch.rand(())))
            return x * self.weight

    stayfinite.find_first_bad_batch(Random(), [INPUT] * 3)
    assert len(set(seen)) == 1


def test_data_loader_with_workers_off_is_read_in_order() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(12.0).view(12, 1) - 6.0)
    loader = torch.utils.data.DataLoader(data, batch_size=3)

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x + 10.0) * (x < 0) + torch.log(4.0 - x) * (x >= 0)

    assert stayfinite.find_first_bad_batch(Log(), loader).index == 3


def test_first_bad_batch_refuses_what_is_no_model() -> None:
    with pytest.raises(InputError, match="model is a int"):
        stayfinite.find_first_bad_batch(3, [])  # type: ignore[arg-type]


def test_it_can_be_asked_while_a_guard_watches() -> None:
    with guarded(on_nan="warn") as guard:
        assert stayfinite.find_first_bad_batch(Net(), batches(1), nn.functional.mse_loss).index == 1
    assert guard.steps >= 0
