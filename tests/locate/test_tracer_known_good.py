"""What was looked at and is good need not be looked at again, unless something bad came into it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stayfinite.locate import operators
from stayfinite.locate.tracer import Tracer


def ops_of(tracer: Tracer, tensor: Tensor) -> list[tuple[str, str]]:
    """Kind and operation of the events behind a bad tensor, oldest first."""
    found, todo = {}, tracer.events_of([tensor])
    while todo:
        event = todo.pop()
        found[event.order] = event.kind, event.op
        todo.extend(event.parents)
    return [found[order] for order in sorted(found)]


def by_a_view(x: Tensor) -> None:
    x[1:].log_()


def by_itself(x: Tensor) -> None:
    x.log_()


def by_data(x: Tensor) -> None:
    x.data.log_()


@pytest.mark.parametrize("poison", [by_a_view, by_itself, by_data])
@pytest.mark.parametrize("keep", [torch.relu, torch.sigmoid, torch.clone])
def test_a_good_tensor_that_is_written_into_is_looked_at_again(
    poison: Callable[[Tensor], None], keep: Callable[[Tensor], Tensor]
) -> None:
    with Tracer() as tracer:
        x = torch.ones(8) * -1
        poison(x)
        out = keep(x) + 1
    assert not out.isfinite().all()
    assert ops_of(tracer, out)[0] == ("birth", "aten.log_.default")


def test_an_operation_that_keeps_values_finite_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Tensor] = []
    true_look = operators._has_bad

    def look(tensor: Tensor) -> bool:
        looked.append(tensor)
        return true_look(tensor)

    monkeypatch.setattr(operators, "_has_bad", look)
    with Tracer():
        x = torch.ones(8) + 1
        y = torch.relu(x)
        z = torch.tanh(y)
        z.mul_(2)
    assert [any(t is each for t in looked) for each in (x, y)] == [True, False]
    assert sum(t is z for t in looked) == 1  # after it was written, not before


def test_what_was_good_in_one_step_is_looked_at_in_the_next() -> None:
    with Tracer() as tracer:
        x = torch.ones(8) * 2
        tracer.next_step(1)
        x.numpy()[0] = float("nan")  # nothing that a dispatch mode sees
        out = torch.relu(x)
    assert ops_of(tracer, out)[-1] == ("spread", "aten.relu.default")
