"""The walk back from what was noticed, and what is known about memory; no model needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from stayfinite.locate.clock import Tracing
from stayfinite.locate.operators import learn
from stayfinite.locate.provenance import (
    Event,
    Provenance,
    Site,
    StorageMap,
    ancestors,
    covers_storage,
    guilty,
    path,
)
from stayfinite.records import NaNType

HERE = Site(None)


def event(order: int, kind: Any, *parents: Event, op: str = "aten.add.Tensor") -> Event:
    return Event(
        order=order,
        kind=kind,
        op=op,
        phase="forward",
        site=HERE,
        nan_type=NaNType.NAN,
        clock=0,
        parents=parents,
    )


def test_every_ancestor_is_met_once_with_the_way_on() -> None:
    birth = event(1, "birth")
    left, right = event(2, "spread", birth), event(3, "spread", birth)
    loss = event(4, "spread", left, right)
    following = ancestors([loss])
    assert set(following) == {birth, left, right, loss}
    assert following[loss] is None
    assert following[left] is loss
    assert path(birth, following) == [birth, left, loss]


@pytest.mark.parametrize(
    ("events", "order"),
    [
        ([(1, "birth"), (2, "spread")], 1),
        ([(1, "constant"), (2, "birth")], 2),
        ([(1, "constant"), (2, "conversion"), (3, "spread")], 2),
        ([(1, "conversion"), (2, "birth")], 2),
        ([(1, "foreign"), (2, "birth")], 1),
        ([(1, "allocation"), (2, "spread")], 1),
        ([(1, "allocation"), (2, "birth")], 1),
        ([(2, "birth"), (1, "birth")], 1),
        ([(1, "constant"), (2, "spread")], 1),
    ],
)
def test_first_that_is_nobodys_consequence_is_guilty(events: list[Any], order: int) -> None:
    assert guilty(event(number, kind) for number, kind in events).order == order


def test_choice_that_takes_a_masked_value_is_guilty_behind_a_constant() -> None:
    fill = event(1, "constant", op="aten.masked_fill.Scalar")
    log = event(2, "spread", fill, op="aten._log_softmax.default")
    choice = event(3, "spread", log, op="aten.nll_loss_forward.default")
    assert guilty([fill, log, choice]) is choice


def test_without_events_nobody_is_guilty() -> None:
    assert guilty([]) is None
    assert ancestors([]) == {}


def test_entry_ends_with_its_memory() -> None:
    known: StorageMap[str] = StorageMap()
    tensor = torch.ones(3)
    known.put(tensor, "here")
    assert known.get(tensor.view(3, 1)) == "here"
    assert known.get(torch.ones(3)) is None
    known.drop(tensor)
    assert known.get(tensor) is None


def test_address_that_is_used_again_is_not_taken_for_the_old_memory() -> None:
    known: StorageMap[str] = StorageMap()
    for number in range(200):
        fresh = torch.ones(16)
        assert known.get(fresh) is None
        known.put(fresh, str(number))


def test_map_does_not_grow_with_dead_memory() -> None:
    known: StorageMap[int] = StorageMap()
    for number in range(10_000):
        known.put(torch.ones(1), number)
    assert len(known) <= 4097


def test_sparse_tensor_is_known_by_its_values() -> None:
    known: StorageMap[str] = StorageMap()
    sparse = torch.eye(3).to_sparse()
    known.put(sparse, "here")
    assert known.get(sparse) == "here"
    assert known.get(torch.eye(3).to_sparse()) is None


def test_view_covers_its_memory_only_if_it_is_all_of_it() -> None:
    whole = torch.ones(4)
    assert covers_storage(whole.view(2, 2))
    assert not covers_storage(whole[1:])
    assert not covers_storage(torch.eye(2).to_sparse())


def test_memory_is_raw_until_as_much_was_written() -> None:
    past = Provenance()
    memory = torch.empty(4)
    past.note_allocation(memory, HERE)
    assert past.site_of_unwritten(memory) is HERE
    past.note_write(memory[:3])
    assert past.site_of_unwritten(memory) is HERE
    past.note_write(memory[3:])
    assert past.site_of_unwritten(memory) is None


def test_integers_and_empty_memory_are_never_raw() -> None:
    past = Provenance()
    for memory in (torch.empty(3, dtype=torch.long), torch.empty(0)):
        past.note_allocation(memory, HERE)
        assert past.site_of_unwritten(memory) is None


def test_value_knows_the_operation_behind_it_and_behind_its_inputs() -> None:
    past = Provenance()
    x = torch.ones(2)
    y, z = x.exp(), x.exp() * 2
    past.note_result(learn(torch.ops.aten.exp.default), (x,), y)
    past.note_result(learn(torch.ops.aten.mul.Tensor), (y, 2.0), z)
    assert past.made_by(z) == ["mul", "exp"]
    assert past.made_by(x) == []


def test_weight_that_an_update_wrote_is_no_result_of_the_batch() -> None:
    past = Provenance()
    weight, x = nn.Parameter(torch.ones(2)), torch.ones(2)
    past.note_entry(x, "inputs.0")
    past.note_result(learn(torch.ops.aten.add_.Tensor), (weight, x), weight)
    assert past.made_by(weight) == []
    assert not past.is_from_batch(weight)
    summed = weight + x
    past.note_result(learn(torch.ops.aten.add.Tensor), (weight, x), summed)
    assert past.is_from_batch(summed)


def silent(*_: Any) -> None:
    pass


def test_tracing_that_is_off_knows_nothing_and_costs_nothing() -> None:
    tracing = Tracing(silent)
    bad = torch.tensor(float("nan"))
    assert not tracing.is_on
    assert tracing.origin([bad], folder=None) is None
    assert not tracing.was_computed(bad)
    with tracing.paused():
        tracing.label(bad, "nothing")
    tracing.switch_off()


def test_tracing_goes_on_at_its_tick() -> None:
    tracing = Tracing(silent)
    states = []
    for _ in range(4):
        tracing.tick(arm_at=3)
        states.append(tracing.is_on)
    tracing.switch_off()
    assert states == [False, False, True, True]


def test_computed_values_are_told_from_written_ones() -> None:
    tracing = Tracing(silent)
    tracing.switch_on()
    try:
        assert tracing.was_computed(torch.log(torch.zeros(2)))
        assert not tracing.was_computed(torch.full((2,), float("-inf")))
        assert not tracing.was_computed(torch.tensor([float("nan")]))
        assert not tracing.was_computed(torch.ones(2))
    finally:
        tracing.switch_off()


@pytest.mark.parametrize(
    ("updates", "clock", "steps", "before"),
    [
        ([2, 4, 6, 8], 9, 2, 4),
        ([2, 4, 6, 8], 9, 0, 8),
        ([2, 4], 5, 2, 0),
        ([], 7, 2, 0),
        ([5, 10, 15], 12, 1, 5),
    ],
)
def test_clock_so_many_updates_before(
    updates: list[int], clock: int, steps: int, before: int
) -> None:
    tracing = Tracing(silent)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for count, tick in enumerate(updates):
        tracing.clock = tick
        tracing.stepped(count + 1, of=optimizer, count=count + 1)
    assert tracing.clock_before(clock, steps=steps) == before


def test_stance_of_the_user_is_kept() -> None:
    with torch.compiler.set_stance("eager_on_recompile"):
        before = torch._dynamo.eval_frame._stance
        tracing = Tracing(silent)
        tracing.switch_on()
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        tracing.switch_off()
        assert torch._dynamo.eval_frame._stance == before
