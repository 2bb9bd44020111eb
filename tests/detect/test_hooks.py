"""Attaching and detaching, order, schedulers, host reads, and what happens when things raise."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from optimizer_variants import NAN, Parameters, Recorder, fresh, image, step
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from stayfinite.detect.hooks import StepListener, watch_scalers, watch_steps
from stayfinite.errors import InputError


class Diary(Recorder):
    """A recorder that also notes each step."""

    def stepped(self, optimizer: Any, *, vetoed: bool | None) -> None:
        self.events.append(f"stepped {vetoed}")


def mlp_run(steps: int, *, fused: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 4))
    optimizer = Adam(model.parameters(), lr=1e-2, fused=fused)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    gradients = [p.grad for p in model.parameters()]
    return image([optimizer, list(model.buffers()), gradients, torch.get_rng_state(), losses])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("defer", [True, False])
def test_healthy_run_of_200_steps_is_byte_identical(fused: bool, defer: bool) -> None:
    recorder = Recorder()
    with watch_steps(recorder, defer=defer), watch_scalers(recorder):
        watched = mlp_run(200, fused=fused)
    assert watched == mlp_run(200, fused=fused)
    assert recorder.events == []


def test_global_watch_sees_optimizers_made_before_and_after() -> None:
    first, params = fresh()
    with watch_steps(recorder := Recorder()):
        second, others = fresh(Adam)
        step(first, params, bad=NAN)
        step(second, others, bad=NAN)
    assert recorder.events == ["refused", "refused"]


def test_watch_on_one_optimizer_leaves_the_others_alone() -> None:
    one, params = fresh()
    other, others = fresh()
    with watch_steps(recorder := Recorder(), optimizer=one):
        step(other, others, bad=NAN)
        assert not other._optimizer_step_pre_hooks
        step(one, params, bad=NAN)
    assert recorder.events == ["refused"]
    assert not all(torch.isfinite(p).all() for p in others.used)


def test_something_else_than_an_optimizer_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="optimizer is a Linear"):
        watch_steps(Recorder(), optimizer=nn.Linear(1, 1))  # type: ignore[arg-type]


def test_removing_twice_is_the_same_as_once() -> None:
    optimizer, params = fresh()
    attachment = watch_steps(Recorder())
    step(optimizer, params)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    attachment.remove()
    attachment.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("fused", [True, False])
def test_watched_optimizer_and_its_parameters_are_freed(fused: bool) -> None:
    gc.collect()
    gc.disable()  # by reference counts alone
    try:
        with watch_steps(Recorder()):
            optimizer, params = fresh(Adam, fused=fused)
            step(optimizer, params)
            step(optimizer, params)
            alive = [weakref.ref(optimizer), weakref.ref(params.used[0])]
            del optimizer, params
            assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("registered", ["before", "after the first step"])
def test_gradients_are_judged_after_the_users_own_hooks(registered: str) -> None:
    optimizer, params = fresh()

    def repair(*_: Any) -> None:
        for param in params.used:
            param.grad.nan_to_num_()

    if registered == "before":
        optimizer.register_step_pre_hook(repair)
    with watch_steps(recorder := Recorder()):
        if registered != "before":
            step(optimizer, params)
            optimizer.register_step_pre_hook(repair)
        step(optimizer, params, bad=NAN)
    assert recorder.events == []


def test_gradients_are_back_before_the_users_post_hooks_run() -> None:
    optimizer, params = fresh()
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(params.used[0].grad))
    with watch_steps(Recorder()):
        step(optimizer, params, bad=NAN)
    assert seen[0] is not None
    assert seen[0] is params.used[0].grad


def test_the_same_gradient_objects_come_back() -> None:
    optimizer, params = fresh()
    with watch_steps(recorder := Recorder()):
        params.fill(bad=NAN)
        before = [p.grad for p in params.used]
        optimizer.step()
    assert [id(p.grad) for p in params.used] == [id(grad) for grad in before]
    assert [id(param) for param, _ in recorder.given] == [id(p) for p in params.used]


@pytest.mark.parametrize("fused", [True, False])
def test_stepped_is_told_once_for_each_attempt(fused: bool) -> None:
    optimizer, params = fresh(Adam, fused=fused)
    with watch_steps(diary := Diary()):
        for bad in (None, None, NAN, None):
            step(optimizer, params, bad=bad)
    late = ["stepped False", *["stepped None"] * 2, "late", "stepped None"]
    told = [*["stepped False"] * 2, "refused", "stepped True", "stepped False"]
    assert diary.events == (late if fused else told)


def test_scaler_skip_counts_as_a_step_too() -> None:
    optimizer, params = fresh()
    scaler = torch.amp.GradScaler("cpu")
    diary = Diary()
    with watch_steps(diary), watch_scalers(diary):
        for bad in (None, NAN):
            scaler.scale(torch.ones(()))
            params.fill(bad=bad)
            scaler.step(optimizer)
            scaler.update()
    assert diary.events == ["stepped False", "scaler", "stepped False"]


def test_flush_reads_the_flag_of_the_last_step() -> None:
    optimizer, params = fresh(Adam, fused=True)
    with watch_steps(recorder := Recorder()) as attachment:
        step(optimizer, params)
        step(optimizer, params, bad=NAN)
        assert recorder.events == []
        attachment.flush()
        assert recorder.events == ["late"]
        attachment.flush()
    assert recorder.events == ["late"]


class Warning_(Recorder):
    def refused(self, optimizer: Any, gradients: Any, *, late: bool) -> bool:
        super().refused(optimizer, gradients, late=late)
        return False


def test_listener_may_let_a_bad_step_pass() -> None:
    optimizer, params = fresh()
    with watch_steps(recorder := Warning_()):
        step(optimizer, params, bad=NAN)
    assert recorder.events == ["refused"]
    assert torch.isnan(params.used[0]).any()


class Unjudged(Recorder):
    def judge(self, optimizer: Any, gradients: Any, *, on_device: bool) -> None:
        return None


@pytest.mark.parametrize("fused", [True, False])
def test_step_that_is_not_judged_goes_through(fused: bool) -> None:
    optimizer, params = fresh(fused=fused)
    with watch_steps(Unjudged()):
        step(optimizer, params, bad=NAN)
    assert torch.isnan(params.used[0]).any()


aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default}


class HostReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


def host_reads(optimizer: Optimizer, params: Parameters, *, bad: float | None = None) -> int:
    params.fill(bad=bad)
    with HostReads() as reads:
        optimizer.step()
    return reads.count


@pytest.mark.parametrize("cls", [SGD, torch.optim.Muon])
def test_at_most_one_host_read_for_each_healthy_step(cls: type[Optimizer]) -> None:
    optimizer, params = fresh(cls)
    with watch_steps(StepListenerForTest()):
        assert max(host_reads(optimizer, params) for _ in range(3)) <= 1


@pytest.mark.parametrize("cls", [SGD, Adam])
def test_no_host_read_in_the_judged_step_of_a_fused_optimizer(cls: type[Optimizer]) -> None:
    optimizer, params = fresh(cls, fused=True)
    step(optimizer, params)
    with watch_steps(recorder := Recorder()) as attachment:
        for bad in (None, NAN, float("inf")):
            assert host_reads(optimizer, params, bad=bad) == 0
            with HostReads() as reads:
                attachment.flush()
            assert reads.count == 1
    assert recorder.events == ["late", "late"]


class StepListenerForTest(StepListener):
    """What a listener does that changes nothing."""


def test_plain_listener_vetoes() -> None:
    optimizer, params = fresh()
    before = image(optimizer)
    with watch_steps(StepListenerForTest()):
        step(optimizer, params, bad=NAN)
    assert image(optimizer) == before


def test_two_watchers_veto_once_and_both_leave() -> None:
    optimizer, params = fresh(Adam, fused=True)
    first, second = Recorder(), Recorder()
    with watch_steps(first), watch_steps(second):
        for bad in (None, None, NAN, None):
            step(optimizer, params, bad=bad)
    assert first.events == second.events == ["late"]
    assert all(torch.isfinite(p).all() for p in params.used)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_step_works(backend: str) -> None:
    optimizer, params = fresh()
    plain, others = fresh()
    with watch_steps(Recorder()):
        torch._dynamo.reset()
        compiled = torch.compile(optimizer.step, backend=backend)
        for _ in range(3):
            params.fill()
            compiled()
    for _ in range(3):
        step(plain, others)
    assert image(params.used) == image(others.used)


def test_group_added_later_is_judged_too() -> None:
    optimizer, params = fresh()
    late = nn.Parameter(torch.ones(2))
    with watch_steps(recorder := Recorder()):
        step(optimizer, params)
        optimizer.add_param_group({"params": [late]})
        late.grad = torch.tensor([1.0, NAN])
        step(optimizer, params)
    assert recorder.events == ["refused"]


def test_step_without_any_gradient_is_told() -> None:
    with watch_steps(diary := Diary()):
        SGD([nn.Parameter(torch.ones(2))], lr=0.1).step()
    assert diary.events == ["stepped False"]
