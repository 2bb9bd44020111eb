"""Guard: stop or warn, before the weights are touched; step numbers; our own failures."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from as_before import attached
from as_before import torch_as_before as torch_as_before
from scenes import Net, guarded
from torch import Tensor, nn
from torch.optim import SGD, Adam

import stayfinite
from stayfinite.errors import ConfigError, TrainingAbortedError
from stayfinite.guard import Guard, GuardSettings

NAN = math.nan


def state_bytes(model: nn.Module, *others: Any) -> bytes:
    tensors = [*model.state_dict().values()]
    for optimizer in others:
        for entry in optimizer.state.values():
            tensors += [value for value in entry.values() if isinstance(value, Tensor)]
    return b"".join(t.detach().contiguous().view(-1).numpy().tobytes() for t in tensors)


def train(
    model: nn.Module,
    optimizer: Any,
    steps: int,
    *,
    bad: Callable[[int], float] = lambda _: 1.0,
    micro: int = 1,
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(micro):
            loss = model(torch.ones(2, 3)).square().mean() * bad(step)
            loss.backward()
        optimizer.step()


def bad_at(step: int) -> Callable[[int], float]:
    return lambda now: NAN if now == step else 1.0


def poison_gradient(model: Net, step: int) -> None:
    """Makes one gradient bad while the loss stays finite."""
    calls = [0]

    def hook(gradient: Tensor) -> Tensor:
        calls[0] += 1
        return gradient * NAN if calls[0] == step + 1 else gradient

    model.first.weight.register_hook(hook)


def test_bad_loss_stops_before_the_backward_pass() -> None:
    net = Net()
    optimizer = Adam(net.parameters())
    with guarded() as guard, pytest.raises(TrainingAbortedError) as stop:
        train(net, optimizer, 5, bad=bad_at(2))
    assert "step 2: loss is not finite" in str(stop.value)
    assert stop.value.incident is guard.incidents[0]
    assert guard.stopped
    assert guard.incidents[0].outcome.strategy == "stop"
    assert all(p.grad is None for p in net.parameters())


def test_vetoed_update_leaves_weights_and_state_byte_identical() -> None:
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    optimizer, other = Adam(net.parameters()), Adam(twin.parameters())
    train(twin, other, 3)
    poison_gradient(net, 3)
    with guarded() as guard, pytest.raises(TrainingAbortedError, match=r"gradients\.first\.weight"):
        train(net, optimizer, 5)
    assert state_bytes(net, optimizer) == state_bytes(twin, other)
    (incident,) = guard.incidents
    assert incident.step == 3
    assert incident.outcome.detail == "the update was not applied"
    assert [report.location for report in incident.reports] == ["gradients.first.weight"]


def test_warning_lets_training_go_on() -> None:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    poison_gradient(net, 2)
    told: list[Any] = []
    guard = Guard(GuardSettings(on_nan="warn"), on_incident=told.append)
    guard.attach()
    train(net, optimizer, 5)
    guard.close()
    assert guard.incidents == told
    assert guard.incidents[0].step == 2
    assert guard.incidents[0].outcome.detail == "nothing was changed"
    assert not guard.stopped
    assert guard.steps == 5
    assert not torch.isfinite(net.first.weight).all()


def test_steps_after_a_bad_update_that_was_applied_have_its_cause() -> None:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with guarded(on_nan="warn") as guard:
        for step in range(5):
            loss = net(torch.ones(2, 3)).sum()
            if step == 2:
                loss = loss * torch.zeros(()).log()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    first, *others = guard.incidents
    assert first.step == 2
    assert [each.step for each in others] == [3, 4]
    assert {each.fingerprint for each in guard.incidents} == {first.fingerprint}
    for each in others:
        assert each.diagnosis.why == (
            "The weights have not been finite since step 2, where nothing was undone. "
            "This step is bad for that reason."
        )


def test_incidents_are_kept_up_to_a_limit() -> None:
    net = Net()
    with guarded(on_nan="warn") as guard:
        for _ in range(55):
            (net(torch.ones(1, 3)).sum() * NAN).backward()
    assert len(guard.incidents) == 50


def test_large_finite_gradients_are_no_incident() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = SGD([weight], lr=0.0)
    with guarded() as guard:
        for _ in range(3):
            weight.grad = torch.full((4,), 3e38)
            optimizer.step()
    assert guard.incidents == []


@pytest.mark.parametrize("trace", ["never", "start"])
def test_step_counts_from_zero_without_an_optimizer(trace: str) -> None:
    gc.collect()  # the optimizers of other tests
    with guarded(trace=trace, on_nan="warn") as guard:
        weight = torch.ones(2, requires_grad=True)
        for step in range(6):
            (weight.sum() * (NAN if step == 4 else 1.0)).backward()
    assert [incident.step for incident in guard.incidents] == [4]


def test_steps_without_an_optimizer_are_backward_passes() -> None:
    with guarded() as guard:
        for _ in range(3):
            torch.ones(2, requires_grad=True).sum().backward()
    assert guard.steps == 3


@pytest.mark.parametrize("trace", ["never", "start"])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_accumulation_counts_updates_and_not_backward_passes(trace: str, step: int) -> None:
    net = Net()
    with guarded(trace=trace) as guard, pytest.raises(TrainingAbortedError):
        train(net, SGD(net.parameters(), lr=0.1), 5, bad=bad_at(step), micro=3)
    assert guard.incidents[0].step == step


def test_last_micro_batch_of_the_first_update_is_step_zero() -> None:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with guarded(on_nan="warn") as guard:
        for micro in range(4):
            (net(torch.ones(2, 3)).sum() * (NAN if micro == 3 else 1.0)).backward()
    assert optimizer.state == {}
    assert guard.incidents[0].step == 0


def test_step_is_that_of_the_optimizer_that_got_the_bad_gradient() -> None:
    often, seldom = Net(), Net()
    optimizers = SGD(often.parameters(), lr=0.1), SGD(seldom.parameters(), lr=0.1)
    poison_gradient(seldom, 1)
    with guarded(on_nan="warn") as guard:
        for step in range(6):
            train(often, optimizers[0], 1)
            if step % 3 == 2:
                train(seldom, optimizers[1], 1)
    assert guard.incidents[0].step == 1
    assert guard.steps == 6


def test_traced_step_is_the_one_in_which_it_was_born() -> None:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with guarded(trace="start", on_nan="warn") as guard:
        carried = torch.zeros(())
        for step in range(6):
            if step == 2:
                carried = torch.log(torch.zeros(()))
            train(net, optimizer, 1)
            if step == 4:
                (net(torch.ones(1, 3)).sum() + carried).backward()
    incident = guard.incidents[0]
    assert incident.step == 2
    assert incident.origin.facts["noticed_step"] == 5
    assert incident.origin.facts["expression"] == "torch.log(torch.zeros(()))"


@pytest.mark.parametrize("where", [0, 7, 39])
def test_bad_parameter_is_found_within_sixteen_steps(where: int) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(40)]
    optimizer = SGD(params, lr=0.0)
    with guarded(on_nan="warn") as guard:
        for step in range(3 + 16):
            for param in params:
                param.grad = torch.zeros(2)
            if step == 3:
                params[where].data.fill_(NAN)
            optimizer.step()
        assert guard.incidents[0].reports[0].location == f"parameters.{where}"


def test_bad_parameter_of_the_last_steps_is_found_at_the_end() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(40)]
    optimizer = SGD(params, lr=0.0)
    with guarded() as guard:
        for param in params:
            param.grad = torch.zeros(2)
        optimizer.step()
        params[39].data.fill_(NAN)
    assert [r.location for r in guard.incidents[0].reports] == ["parameters.39"]


def healthy(trace: str | None) -> list[bytes]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    optimizer = Adam(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    guard = Guard(GuardSettings(trace=trace)) if trace else None
    if guard:
        guard.attach()
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = net(torch.randn(8, 6)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    if guard:
        guard.close()
        assert guard.incidents == []
        assert guard.steps == 12
    return [state_bytes(net, optimizer), repr(losses).encode(), torch.get_rng_state().numpy()
            .tobytes()]  # fmt: skip


@pytest.mark.parametrize("trace", ["never", "start"])
def test_healthy_run_is_bit_identical_with_a_guard(trace: str) -> None:
    assert healthy(trace) == healthy(None)


def test_infinite_root_that_is_no_loss_is_let_through() -> None:
    scores = torch.zeros(3, requires_grad=True)
    with guarded() as guard:
        masked = scores + torch.tensor([0.0, 0.0, -math.inf])
        masked.backward(torch.ones(3))
    assert guard.incidents == []


@pytest.mark.parametrize("trace", ["never", "start"])
@pytest.mark.parametrize(
    "part",
    [
        "guard.all_finite",
        "guard.finite_number",
        "guard.incident_of",
        "answers.bad_gradients",
        "guard.nonfinite",
    ],
)
def test_our_own_failure_is_logged_once_and_training_goes_on(
    part: str, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(f"stayfinite.guard.{part}", broken)
    net = Net()
    poison_gradient(net, 1)
    with heard() as records, guarded(trace=trace, on_nan="warn") as guard:
        train(net, SGD(net.parameters(), lr=0.1), 3)
    assert guard.steps == 3
    assert [record.name for record in records] == ["stayfinite"]


@contextlib.contextmanager
def heard() -> Iterator[list[logging.LogRecord]]:
    """What we log; as caplog, which a replay would keep, and with it all of pytest."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("stayfinite")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


def test_closing_twice_is_the_same_as_once() -> None:
    before = attached()
    guard = Guard(GuardSettings(trace="start"))
    guard.attach()
    assert attached() != before
    guard.close()
    guard.close()
    assert attached() == before


def test_optimizers_have_no_hook_of_ours_after_closing() -> None:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with guarded():
        train(net, optimizer, 2)
        assert optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert "step" not in vars(optimizer)
    copy.deepcopy(optimizer)


@pytest.mark.parametrize(
    "settings",
    [{"on_nan": "ignore"}, {"trace": "always"}, {"max_scaler_skips": 0}],
    ids=lambda settings: next(iter(settings)),
)
def test_setting_that_cannot_be_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        GuardSettings(**settings)


def test_tracing_starts_at_the_tick_it_was_asked_for() -> None:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with guarded() as first, pytest.raises(TrainingAbortedError):
        train(net, optimizer, 9, bad=bad_at(6))
    tick = first.arm_at()
    assert 0 < tick < first.past.tracing.clock
    net = Net()
    settings = {"trace": "armed", "arm_at": tick}
    with guarded(**settings) as second, pytest.raises(TrainingAbortedError):
        train(net, SGD(net.parameters(), lr=0.1), 9, bad=bad_at(6))
    (incident,) = second.incidents
    assert incident.step == 6
    assert incident.origin.exact
    assert incident.origin.facts["expression"].endswith("* bad(step)")


def test_untraced_incident_has_the_node_that_kept_a_bad_value() -> None:
    net = Net()
    with guarded(again="never") as guard, pytest.raises(TrainingAbortedError):
        torch.log(net(torch.ones(2, 3)) * 0.0).square().mean().backward()
    origin = guard.incidents[0].origin
    assert not origin.exact
    assert origin.node == "PowBackward0"


def test_child_process_starts_its_own_books() -> None:
    net = Net()
    with guarded(on_nan="warn") as guard:
        train(net, SGD(net.parameters(), lr=0.1), 3, bad=bad_at(1))
        guard.after_fork()
        assert (guard.incidents, guard.steps, guard.scaler_skips) == ([], 0, 0)


def test_recommendations_know_the_norms_of_good_steps() -> None:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    with stayfinite.watch(net, optimizer, sinks=[], again="never") as guard:
        train(net, optimizer, 20)
        poison_gradient(net, 1)
        train(net, optimizer, 3)
    assert guard.incidents
    assert any("norm" in text for text in map(str, guard.manager.get_recommendations()))


def test_modules_on_the_meta_device_do_not_hinder_an_explanation() -> None:
    shapes = torch.nn.Linear(2, 1, device="meta")  # as libraries use to find out shapes
    weight = torch.nn.Parameter(torch.ones(2))
    guard = Guard(GuardSettings(on_nan="warn", trace="start"))
    guard.attach()
    shapes(torch.ones(1, 2, device="meta"))
    torch.log(weight.sum() - 2).backward()
    guard.close()
    (incident,) = guard.incidents
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == "log_of_zero"
