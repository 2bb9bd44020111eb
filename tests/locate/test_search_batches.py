"""Which batch is the first bad one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scenes import Net, Unstable, guarded
from torch import Tensor, nn

import stayfinite
from stayfinite.errors import ConfigError, InputError

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
    found = stayfinite.find_first_bad_batch(net, loader, loss_fn=nn.functional.mse_loss)
    assert is_same()
    assert found.index == bad
    assert found.batch is loader[bad]
    assert found.reports[0].location == "inputs.0"
    assert found.reason == "inputs.0 holds Inf"
    assert found.origin.phase == "data"


def test_batch_with_finite_values_is_named_by_the_operation() -> None:
    model = Unstable()
    loader = [torch.ones(4, 3), torch.zeros(4, 3)]
    found = stayfinite.find_first_bad_batch(model, loader)
    assert (found.index, found.reports) == (1, ())
    assert found.reason.startswith("aten.log.default at ")
    assert found.origin.facts["expression"] == "torch.log(x)"


def test_no_bad_batch_is_a_pair_of_none_and_leaves_all_as_before(untouched: Any) -> None:
    model = Unstable()
    is_same = untouched(model)
    found = stayfinite.find_first_bad_batch(model, [INPUT, INPUT])
    assert found == (None, None)
    assert not found
    assert found.reason == "2 batches were looked at, and all are finite"
    assert stayfinite.find_first_bad_batch(model, []).looked_at == 0
    assert is_same()


def test_only_so_many_batches_are_tried() -> None:
    net = Net()

    def looked(made: Any, *count: int) -> tuple[int | None, int]:
        found = stayfinite.find_first_bad_batch(net, made, *count, loss_fn=nn.functional.mse_loss)
        return found.index, found.looked_at

    assert looked(batches(4), 4) == (None, 4)
    assert looked(batches(4), 5) == (4, 5)
    endless = (pair for _ in iter(int, 1) for pair in batches(None))
    assert looked(endless, 3) == (None, 3)
    assert looked(endless) == (None, 100)  # nobody waits for ever
    assert stayfinite.find_first_bad_batch(net, [INPUT] * 120, None).looked_at == 120


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
        found = stayfinite.find_first_bad_batch(Net(), batches(1), loss_fn=nn.functional.mse_loss)
        assert found.index == 1
    assert guard.steps >= 0


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "3"])
def test_count_of_batches_is_a_whole_number(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_batches is .*; it must be a whole number"):
        stayfinite.find_first_bad_batch(Net(), [], count)


def test_loss_function_in_the_wrong_place_is_sent_to_its_name() -> None:
    with pytest.raises(ConfigError, match="Give the loss function by name, loss_fn="):
        stayfinite.find_first_bad_batch(Net(), [], nn.functional.mse_loss)  # type: ignore[arg-type]


def test_result_is_a_pair_with_more_to_say() -> None:
    loader = batches(2)
    index, batch = found = stayfinite.find_first_bad_batch(Net(), loader, loss_fn=mse)
    assert (index, batch) == (found[0], found[1]) == (2, loader[2])
    assert found
    assert "holds Inf" in repr(found)


mse = nn.functional.mse_loss


class Counted(nn.Module):
    """How many passes there were, and of how many samples."""

    def __init__(self, *after: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), *after, nn.Linear(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def sizes_of(model: nn.Module) -> list[int]:
    """How many samples each pass has from now on; not kept in the model, which is put back."""
    sizes: list[int] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        sizes.append(len(args[0] if args else kwargs["x"]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return sizes


def varied(count: int, *bad: int, rows: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = [
        (torch.randn(rows, 3, generator=generator), torch.randn(rows, 1, generator=generator))
        for _ in range(count)
    ]
    for number in bad:
        made[number][0][1, 2] = math.nan
    return made


def summed(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).sum()


@pytest.mark.parametrize("loss_fn", [mse, summed])
@pytest.mark.parametrize("bad", [0, 1, 2, 3, 31, 50, 63])
def test_first_of_many_is_found_in_few_passes(bad: int, loss_fn: Any) -> None:
    torch.manual_seed(0)
    model, made = Counted(), varied(64, bad, 63)
    sizes = sizes_of(model)
    found = stayfinite.find_first_bad_batch(model, made, loss_fn=loss_fn)
    assert found.index == bad
    assert found.batch is made[bad]
    traced = 1  # the pass that finds the operation
    assert found.passes == len(sizes) - traced
    assert found.passes <= bad + 3  # never many more than one by one
    assert found.passes <= 16
    assert bad < found.looked_at <= 64
    assert max(sizes) <= 16 * 4


def test_all_good_ones_take_few_passes_too() -> None:
    torch.manual_seed(0)
    found = stayfinite.find_first_bad_batch(Counted(), iter(varied(100)), loss_fn=mse)
    assert (found.index, found.looked_at) == (None, 100)
    assert found.passes <= 12


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_batches_that_are_not_the_same_together_are_tried_alone(layer: nn.Module) -> None:
    torch.manual_seed(0)
    model = Counted(layer)
    sizes = sizes_of(model)
    found = stayfinite.find_first_bad_batch(model, varied(20, 17), loss_fn=mse)
    assert (found.index, found.looked_at, found.passes) == (17, 18, 19)  # one to find that out
    assert sorted(set(sizes)) == [4, 8]


def test_batch_that_is_bad_by_its_size_is_not_hidden_among_others() -> None:
    class Spread(nn.Module):
        """Divides by zero for one row, as the spread of a batch does."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 1:
                return self.layer(x) / x.new_zeros(())
            return self.layer(x)

    torch.manual_seed(0)
    made = varied(20)
    made[13] = varied(1, rows=1)[0]
    assert stayfinite.find_first_bad_batch(Spread(), made, loss_fn=mse).index == 13


def test_gradient_that_overflows_alone_overflows_together() -> None:
    class Steep(nn.Module):
        """The gradient of a batch is finite only where its mean weighs little."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight - x) * x

    made = varied(40)
    made[20] = (torch.full((4, 3), 2e19), torch.zeros(4, 1))
    made = [(x, torch.zeros(4, 3)) for x, _ in made]

    def first(output: Tensor, target: Tensor) -> Tensor:
        return (output + target).mean() + target.mean()

    alone = [
        stayfinite.find_first_bad_batch(Steep(), [batch], loss_fn=first).index for batch in made
    ]
    found = stayfinite.find_first_bad_batch(Steep(), made, loss_fn=first)
    assert found.index == next((n for n, index in enumerate(alone) if index == 0), None)


def test_pass_that_is_too_large_is_made_smaller() -> None:
    class Small(Counted):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 16:
                raise torch.OutOfMemoryError("too large")
            return super().forward(x)

    torch.manual_seed(0)
    assert stayfinite.find_first_bad_batch(Small(), varied(30, 25), loss_fn=mse).index == 25


def test_overflow_of_a_sum_is_no_bad_batch() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    made = [torch.full((2, 3), 1.0 + number) for number in range(4)]
    made += [torch.full((2, 3), 4e37) for _ in range(4)]
    found = stayfinite.find_first_bad_batch(Large(), made)
    assert (found.index, found.looked_at) == (None, 8)


def test_mappings_are_joined_and_other_things_are_not() -> None:
    class Keys(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor, name: str) -> Tensor:
            return self.layer(x).mean()

    torch.manual_seed(0)
    same, other = Keys(), Keys()
    together, apart = sizes_of(same), sizes_of(other)
    made = [x for x, _ in varied(20, 15)]
    named = [{"x": x, "name": "all"} for x in made]
    each = [{"x": x, "name": str(number)} for number, x in enumerate(made)]
    assert stayfinite.find_first_bad_batch(same, named).index == 15
    assert stayfinite.find_first_bad_batch(other, each).index == 15
    assert max(together) > 4
    assert max(apart) == 4
