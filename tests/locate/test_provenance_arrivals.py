"""Values that nobody computed: data, checkpoints, memory that was never written."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from scenes import Net, guilty, origin
from torch import Tensor, nn

from stayfinite.explain.clue import Context
from stayfinite.explain.rules import diagnose
from stayfinite.locate.origin import origin_of
from stayfinite.locate.tracer import Tracer
from stayfinite.testing import Harm


@pytest.fixture
def filled_with_nan() -> Iterator[None]:
    """torch then fills new memory with NaN, so that nothing depends on what was there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_with_nan")
class TestMemory:
    def test_memory_that_is_read_before_it_is_written_is_the_origin(self) -> None:
        def step() -> Tensor:
            centers = torch.empty(3)
            return (centers * 2.0).sum()

        found = origin(step)
        assert found.lineage[0].kind == "allocation"
        assert (found.phase, found.facts["expression"]) == ("init", "torch.empty(3)")

    @pytest.mark.parametrize("how", ["copy", "fill", "out", "slices", "normal"])
    def test_memory_that_is_written_first_is_no_origin(self, how: str) -> None:
        def step() -> Tensor:
            memory = torch.empty(4)
            if how == "copy":
                memory.copy_(torch.ones(4))
            elif how == "fill":
                memory.fill_(1.0)
            elif how == "out":
                torch.add(torch.ones(4), 1.0, out=memory)
            elif how == "slices":
                memory[:2], memory[2:] = torch.ones(2), torch.zeros(2)
            else:
                nn.init.normal_(memory)
            return memory * 2.0

        assert origin(step) is None

    def test_half_written_memory_is_the_origin(self) -> None:
        def step() -> Tensor:
            memory = torch.empty(4)
            memory[:2] = 1.0
            return memory.sum()

        assert guilty(step) == "torch.empty(4)"

    def test_birth_written_into_new_memory_is_the_birth(self) -> None:
        def step() -> Tensor:
            memory = torch.empty(3)
            torch.log(torch.zeros(3), out=memory)
            return memory

        assert guilty(step) == "torch.log(torch.zeros(3), out=memory)"

    def test_parameter_from_empty_memory_is_named_with_the_module_that_used_it(self) -> None:
        class Centers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Parameter(torch.empty(2, 2))

            def forward(self, x: Tensor) -> Tensor:
                return x @ self.table

        found = origin(lambda: Centers()(torch.ones(1, 2)))
        assert found.facts["expression"] == "torch.empty(2, 2)"
        assert (found.phase, found.root) == ("init", "Centers")


def test_batch_that_is_bad_is_named_where_the_model_is_called() -> None:
    net, batch = Net(), torch.ones(4, 3)
    batch[2, 1] = math.nan

    def step() -> Tensor:
        return net(batch).sum()

    found = origin(step)
    assert (found.phase, found.op) == ("data", None)
    assert found.code == "return net(batch).sum()"
    assert found.outputs[0].name == "inputs.0"
    assert found.outputs[0].first_bad_index == (2, 1)


def test_target_that_is_bad_is_named_where_it_is_used() -> None:
    net, target = Net(), torch.from_numpy(np.array([[np.inf]], dtype=np.float32))

    def step() -> Tensor:
        output = net(torch.ones(1, 3))
        return nn.functional.mse_loss(output, target)

    found = origin(step)
    assert found.phase == "data"
    assert found.code == "return nn.functional.mse_loss(output, target)"


def test_weight_that_was_bad_before_is_an_init() -> None:
    net = Net()
    net.first.weight.data[0, 0] = math.nan
    found = origin(lambda: net(torch.ones(1, 3)))
    assert found.phase == "init"


def test_labelled_weight_comes_from_the_checkpoint() -> None:
    net = Net()
    net.first.weight.data[0, 0] = math.nan
    with Tracer() as tracer:
        tracer.label([net.first.weight], "first.weight of last.pt")
        loss = net(torch.ones(1, 3)).sum()
        found, event = origin_of(tracer.events_of([loss]), folder=None)
    assert found.phase == "checkpoint"
    assert event.outputs[0].name == "first.weight of last.pt"


class TestChanged:
    """Computed in the step, and changed by no operation: neither data nor a birth."""

    def test_gradient_is_named_by_the_module_whose_parameter_it_belongs_to(self) -> None:
        net = Net()
        with Tracer() as tracer:
            net(torch.ones(1, 3)).sum().backward()
            spoil(net.first.weight.grad)
            found, _ = origin_of(tracer.events_of([net.first.weight.grad]), folder=None)
        assert (found.phase, found.op, found.module) == ("backward", None, "first")
        assert diagnose(found, Context()).cause == "unknown"

    def test_gradient_is_known_after_clipping_has_spread_it(self) -> None:
        net = Net()
        with Tracer() as tracer:
            net(torch.ones(1, 3)).sum().backward()
            spoil(net.first.weight.grad)
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            bad = [p.grad for p in net.parameters() if p.grad is not None]
            found, _ = origin_of(tracer.events_of(bad), folder=None)
        assert (found.phase, found.module) == ("backward", "first")

    def test_gradient_inside_the_backward_pass_has_the_line_that_reads_it(self) -> None:
        net = Net()

        def step() -> Tensor:
            loss = torch.exp(net(torch.ones(1, 3)))
            loss.register_hook(spoil)
            (loss * 2.0).backward()
            return net.first.weight.grad

        found = origin(step)
        assert (found.phase, found.op) == ("backward", None)
        assert found.code == "loss = torch.exp(net(torch.ones(1, 3)))"

    def test_loss_has_the_line_that_computed_it(self) -> None:
        net = Net()

        def step() -> Tensor:
            loss = net(torch.ones(1, 3)).sum()
            spoil(loss)
            return loss

        found = origin(step)
        assert (found.phase, found.op) == ("forward", None)
        assert found.code == "loss = net(torch.ones(1, 3)).sum()"
        assert diagnose(found, Context()).cause == "unknown"

    @pytest.mark.parametrize("seen_as", ["itself", "view"])
    def test_input_that_wants_a_gradient_is_still_data(self, seen_as: str) -> None:
        net, batch = Net(), torch.full((1, 3), math.nan, requires_grad=True)

        def step() -> Tensor:
            return net(batch if seen_as == "itself" else batch.view(1, 3)).sum()

        assert origin(step).phase == "data"


def spoil(tensor: Tensor | None) -> None:
    """As a flipped bit would: no operation is seen."""
    Harm().write(tensor, location="", step=0)  # type: ignore[arg-type]


def test_finite_tensors_have_no_events() -> None:
    with Tracer() as tracer:
        assert tracer.events_of([torch.ones(3), torch.tensor([1, 2]), torch.ones(0)]) == []


def test_paused_tracer_sees_nothing() -> None:
    with Tracer() as tracer:
        with tracer.paused():
            bad = torch.log(torch.zeros(2))
        (event,) = tracer.events_of([bad])
    assert event.kind == "foreign"


def test_tracer_keeps_no_tensor_alive() -> None:
    import weakref

    with Tracer() as tracer:
        bad = torch.log(torch.zeros(2))
        held = weakref.ref(bad)
        del bad
        assert held() is None
        assert tracer.count == 1
