"""What the tracer keeps of bad operations: what they were given, in bounded memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stayfinite.locate import capture
from stayfinite.locate.capture import Kept, KeptCalls
from stayfinite.locate.provenance import ancestors, guilty
from stayfinite.locate.tracer import Tracer
from stayfinite.records import NaNType, TensorSummary


def kept_of(tracer: Tracer, bad: Tensor) -> Kept | None:
    event = guilty(ancestors(tracer.events_of([bad])))
    assert event is not None
    assert tracer.kept is not None
    return tracer.kept.of(event)


def test_inputs_are_copies_of_what_they_were() -> None:
    with Tracer(kept=KeptCalls()) as tracer:
        values = torch.zeros(3)
        bad = values.log()
        values.fill_(5)
        kept = kept_of(tracer, bad)
    assert kept is not None
    assert kept.nan_type is NaNType.NEG_INF
    assert kept.call.op == "aten.log.default"
    assert kept.call.arguments["self"].tolist() == [0, 0, 0]


def test_what_an_operation_overwrites_is_kept_as_it_was_before() -> None:
    with Tracer(kept=KeptCalls()) as tracer:
        values = torch.ones(3)
        values.div_(torch.tensor([1.0, 0.0, 1.0]))
        kept = kept_of(tracer, values)
    assert kept is not None
    assert kept.call.arguments["self"].tolist() == [1, 1, 1]


def test_of_a_list_only_the_members_beside_the_bad_one_are_kept() -> None:
    with Tracer(kept=KeptCalls()) as tracer:
        members = [torch.ones(2), torch.full((4,), 1e38), torch.ones(3)]
        torch._foreach_mul_(members, [torch.tensor(1.0), torch.tensor(1e9), torch.tensor(1.0)])
        kept = kept_of(tracer, members[1])
    assert kept is not None
    assert [each.shape for each in kept.call.arguments["self"]] == [(4,)]
    assert kept.call.arguments["self"][0][0] == 1e38


def test_backward_operation_comes_with_its_forward_one() -> None:
    with Tracer(kept=KeptCalls()) as tracer:
        values = torch.zeros(2, requires_grad=True)
        values.sqrt().sum().backward()
        assert values.grad is not None
        kept = kept_of(tracer, values.grad)
    assert kept is not None
    assert kept.forward is not None
    assert kept.forward.op == "aten.sqrt.default"
    assert kept.forward.arguments["self"].tolist() == [0, 0]


def test_forward_input_that_was_changed_since_is_not_shown() -> None:
    with Tracer(kept=KeptCalls()) as tracer:
        values = torch.zeros(2, requires_grad=True)
        inner = values * 1
        loss = inner.sqrt().sum()  # the root saves its result, so its input may be changed
        with torch.no_grad():
            inner.add_(1)
        loss.backward()
        assert values.grad is not None
        kept = kept_of(tracer, values.grad)
    assert kept is not None
    assert kept.forward is None


def test_large_inputs_are_only_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "ONE_CALL", 100)
    with Tracer(kept=KeptCalls()) as tracer:
        bad = torch.zeros(100).log()
        kept = kept_of(tracer, bad)
    assert kept is not None
    assert isinstance(kept.call.arguments["self"], TensorSummary)
    assert kept.call.nbytes == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_ALL_CALLS", 10_000)
    with Tracer(kept=KeptCalls()) as tracer:
        bad = []
        for clock in range(50):
            tracer.next_step(clock)
            bad.append(torch.zeros(100).log())
        assert kept_of(tracer, bad[0]) is None
        assert kept_of(tracer, bad[-1]) is not None
        assert sum(each.call.nbytes for each in tracer.kept._kept.values()) <= 10_000


def test_beginning_has_buffers_and_generators_as_they_were() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    running = net[0].running_mean.clone()
    batch = torch.randn(4, 3) * 0 + 1
    random = torch.get_rng_state()
    with Tracer(kept=KeptCalls()) as tracer:
        net(batch)
        beginning = tracer.kept.beginning
    assert beginning is not None
    assert torch.equal(beginning.random.torch, random)
    assert not torch.equal(net[0].running_mean, running)
    assert torch.equal(beginning.buffers[id(net)]["0.running_mean"], running)
    assert beginning.entries[0][1][0] is batch


def test_training_is_the_same_to_the_byte_while_it_keeps() -> None:
    def trained(keeps: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        tracer = Tracer(kept=KeptCalls())
        if keeps:
            tracer.__enter__()
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.randn(6, 3)).square().mean().backward()
            optimizer.step()
        if keeps:
            tracer.__exit__(None, None, None)
        return [param.detach() for param in net.parameters()]

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)
