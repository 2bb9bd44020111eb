"""DynamicLossScaler one behaviour at a time."""

from __future__ import annotations

import copy
import doctest
import logging
import math
import pickle
from typing import Any

import pytest
import torch
from scaling import Training, gradient
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import stayfinite.amp.scaler
from stayfinite.amp.scaler import DynamicLossScaler
from stayfinite.errors import ConfigError, RecordError, TrainingAbortedError
from stayfinite.snapshot import Snapshot, TrainingState

BAD = [math.nan, math.inf, -math.inf]


def cpu(**options: Any) -> DynamicLossScaler:
    return DynamicLossScaler("cpu", **options)


def after(scaler: Any, *events: Any) -> float:
    """The scale when all this has happened."""
    training = Training(scaler)
    for event in events:
        training.step(event)
    return scaler.get_scale()


def test_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(stayfinite.amp.scaler)
    assert result.attempted > 5
    assert not result.failed


# Bad gradients, wherever they come from


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_bad_gradient_is_skipped(bad: float, unscale: bool, fused: bool) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = Adam([weight], fused=fused), cpu()
    scaler.scale(weight.sum() * bad).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0] * 3
    assert not optimizer.state
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("good_before", [0, 2])
def test_gradient_that_goes_bad_after_unscaling_is_skipped(
    bad: float, fused: bool, good_before: int
) -> None:
    weight = nn.Parameter(torch.ones(3))
    training = Training(cpu(), Adam([weight], fused=fused))
    for _ in range(good_before):
        training.step()
    before = copy.deepcopy(training.optimizer.state_dict()), weight.tolist()
    training.scaler.scale(weight.sum()).backward()
    training.scaler.unscale_(training.optimizer)
    gradient(weight)[1] = bad
    training.scaler.step(training.optimizer)
    training.scaler.update()
    assert repr((training.optimizer.state_dict(), weight.tolist())) == repr(before)
    assert training.scaler.get_scale() == 2.0**15


def test_torchs_scaler_lets_it_through() -> None:
    training = Training(GradScaler("cpu"))
    training.step("late")
    assert training.weight.isnan().any()


def test_clipping_that_makes_a_nan_is_skipped() -> None:
    weight = nn.Parameter(torch.ones(2))
    training = Training(cpu(init_scale=1.0), SGD([weight], lr=0.1))
    training.scaler.scale(torch.ones(()))
    weight.grad = torch.tensor([3e38, 3e38])  # finite, its norm is not
    training.scaler.unscale_(training.optimizer)
    weight.grad.mul_(math.inf / weight.grad.norm())
    training.scaler.step(training.optimizer)
    assert weight.tolist() == [1.0, 1.0]


def spoil(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        gradient(group["params"][0]).mul_(math.nan)


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("of_all", [True, False])
def test_gradient_that_a_hook_of_the_optimizer_spoils_is_skipped(
    unscale: bool, fused: bool, of_all: bool
) -> None:
    weight = nn.Parameter(torch.ones(3))
    training = Training(cpu(), Adam([weight], fused=fused))
    training.step()
    before = weight.tolist()
    optimizer = training.optimizer
    handle = (
        register_optimizer_step_pre_hook(spoil)
        if of_all
        else optimizer.register_step_pre_hook(spoil)
    )
    hooks = dict(optimizer._optimizer_step_pre_hooks)
    try:
        training.scaler.scale(weight.sum()).backward()
        if unscale:
            training.scaler.unscale_(optimizer)
        assert training.scaler.step(optimizer) is None
        training.scaler.update()
        assert dict(optimizer._optimizer_step_pre_hooks) == hooks
    finally:
        handle.remove()
    assert weight.tolist() == before
    assert training.scaler.get_scale() == 2.0**15
    assert "found_inf" not in vars(optimizer)
    training.step()
    assert weight.tolist() != before


def test_fused_gradient_that_overflows_when_it_is_divided_is_skipped() -> None:
    weight = nn.Parameter(torch.ones(3))
    scaler = cpu(init_scale=2.0**-20, min_scale=2.0**-30)
    training = Training(scaler, Adam([weight], fused=True))
    training.step()
    before = weight.tolist()
    weight.grad = torch.full((3,), 1e35)  # finite, and 1e41 when it is unscaled
    scaler.step(training.optimizer)
    scaler.update()
    assert weight.tolist() == before
    assert scaler.get_scale() == 2.0**-21


@pytest.mark.parametrize("fused", [True, False])
def test_skipped_step_was_the_step_of_this_update(fused: bool) -> None:
    weight = nn.Parameter(torch.ones(3))
    training = Training(cpu(), Adam([weight], fused=fused))
    training.attempt("inf")
    with pytest.raises(RuntimeError, match="already been called"):
        training.scaler.step(training.optimizer)


def test_raising_fused_step_does_not_leave_its_scale_behind() -> None:
    weight = nn.Parameter(torch.ones(3))
    training = Training(cpu(), Adam([weight], fused=True))
    twin = copy.deepcopy(training)
    training.step()
    twin.step()

    def fail(*_: Any) -> None:
        raise KeyError("once")

    handle = training.optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        training.attempt()
    handle.remove()
    training.scaler.update()
    twin.attempt("none")
    twin.scaler.update()
    training.step()
    twin.step()
    assert training.weights[0].tolist() == twin.weights[0].tolist()


# Several optimizers, accumulation, missing and sparse gradients


def test_overflow_of_one_optimizer_does_not_skip_the_other() -> None:
    scaler = cpu()
    bad, good = Training(scaler), Training(scaler)
    bad.attempt("inf")
    good.attempt("good")
    scaler.update()
    assert bad.weight.tolist() == [1.0] * 3
    assert good.weight.tolist() == [1.0 - 2.0**-6] * 3
    assert scaler.get_scale() == 2.0**15


def test_late_nan_of_the_second_optimizer_lowers_the_scale() -> None:
    scaler = cpu()
    first, second = Training(scaler), Training(scaler)
    first.attempt("good")
    second.attempt("late")
    scaler.update()
    assert scaler.get_scale() == 2.0**15


def test_overflow_in_one_part_of_an_accumulated_batch_skips_the_whole() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = SGD([weight], lr=0.5), cpu()
    for factor in (1.0, math.inf, 1.0):
        scaler.scale((weight * factor).sum() / 3).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0] * 3


def test_accumulated_gradients_are_unscaled_once() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = SGD([weight], lr=0.5), cpu()
    for _ in range(4):
        scaler.scale(weight.sum() / 4).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [0.5] * 3


@pytest.mark.parametrize("fused", [True, False])
def test_optimizer_without_any_gradient_is_stepped_as_without_a_scaler(fused: bool) -> None:
    weight = nn.Parameter(torch.ones(3))
    training = Training(cpu(), Adam([weight], fused=fused))
    training.step("none")
    assert weight.tolist() == [1.0] * 3
    assert training.scaler.get_scale() == 2.0**16


@pytest.mark.parametrize("bad", [None, "early", "late"])
def test_sparse_gradients_are_judged(bad: str | None) -> None:
    words = nn.Embedding(5, 2, sparse=True)
    before = words.weight.tolist()
    optimizer, scaler = SGD(words.parameters(), lr=0.5), cpu()
    out = words(torch.tensor([1, 1, 3])).sum()
    scaler.scale(out * math.inf if bad == "early" else out).backward()
    scaler.unscale_(optimizer)
    if bad == "late":
        gradient(words.weight)._values()[2, 0] = math.nan
    scaler.step(optimizer)
    assert (words.weight.tolist() == before) == (bad is not None)
    assert words.weight.isfinite().all()


def test_half_precision_gradients_are_refused_as_torch_does() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer, scaler = SGD([weight], lr=0.5), cpu()
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(optimizer)


# Hysteresis

FOUR = ("inf", "inf", "good", "inf")


@pytest.mark.parametrize(
    ("hysteresis", "mode", "events", "falls"),
    [
        (1, "interval", FOUR, 3),
        (2, "interval", ("inf",), 0),
        (2, "interval", ("inf", "inf"), 1),
        (2, "interval", ("inf", "inf", "inf"), 2),
        (2, "interval", ("inf", "good", "inf"), 1),
        (2, "consecutive", ("inf", "good", "inf"), 0),
        (2, "consecutive", FOUR, 1),
        (2, "interval", FOUR, 2),
        (2, "interval", ("inf", *["good"] * 5, "inf"), -1),  # a whole interval: it has grown
        (3, "consecutive", ("inf", "inf", "inf", "inf"), 2),
    ],
)
def test_tolerance_is_spent_and_restored(
    hysteresis: int, mode: Any, events: tuple[str, ...], falls: int
) -> None:
    scaler = cpu(growth_interval=5, hysteresis=hysteresis, hysteresis_mode=mode)
    assert after(scaler, *events) == 2.0 ** (16 - falls)
    assert (scaler.hysteresis, scaler.hysteresis_mode) == (hysteresis, mode)


def test_tolerated_overflow_starts_the_interval_again() -> None:
    scaler = cpu(growth_interval=3, hysteresis=2)
    assert after(scaler, "good", "good", "inf", "good", "good") == 2.0**16
    assert after(scaler, "good") == 2.0**17


# At the floor


def test_overflows_at_the_floor_are_counted_in_a_row() -> None:
    scaler = cpu(init_scale=2.0, floor_patience=100)
    counts = []
    training = Training(scaler)
    for event in ("inf", "inf", "late", "good", "nan"):
        training.step(event)
        counts.append(scaler.overflows_at_floor)
    assert counts == [0, 1, 2, 0, 1]  # the first one still had a scale to lower


def test_it_says_so_when_the_scale_cannot_be_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="stayfinite"):
        after(cpu(init_scale=1.0, floor_patience=3), *["inf"] * 2, "good", *["inf"] * 7)
    assert len(caplog.records) == 2  # after three in a row, and after three more
    assert "the scale is not the cause" in caplog.text


def test_it_says_so_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="stayfinite"):
        after(cpu(init_scale=1.0, floor_patience=3), *["inf"] * 40)
    said = [record.getMessage() for record in caplog.records]
    begins = [f"stayfinite: the last {count} steps overflowed" for count in (3, 6, 12, 24)]
    assert [text[: len(begin)] for text, begin in zip(said, begins, strict=True)] == begins


def test_it_aborts_when_asked_to() -> None:
    training = Training(cpu(init_scale=1.0, floor_patience=2, on_floor="abort"))
    training.step("inf")
    with pytest.raises(TrainingAbortedError, match="last 2 steps overflowed"):
        training.step("inf")
    assert training.weight.tolist() == [1.0] * 3
    training.step("good")  # whoever goes on all the same can
    assert training.weight.tolist() != [1.0] * 3


def test_it_calls_back_when_asked_to() -> None:
    told: list[int] = []
    scaler = cpu(
        init_scale=1.0, floor_patience=2, on_floor=lambda s: told.append(s.overflows_at_floor)
    )
    after(scaler, *["nan"] * 5)
    assert told == [2, 4]


# torch's public API


def test_it_is_a_gradscaler_with_torchs_defaults() -> None:
    ours, theirs = cpu(), GradScaler("cpu")
    assert isinstance(ours, GradScaler)
    assert ours.is_enabled()
    for name in ("scale", "growth_factor", "backoff_factor", "growth_interval"):
        assert getattr(ours, f"get_{name}")() == getattr(theirs, f"get_{name}")()


def test_positional_arguments_are_torchs() -> None:
    scaler = DynamicLossScaler("cpu", 8.0, 4.0, 0.25, 7, False)
    assert not scaler.is_enabled()
    scaler = DynamicLossScaler("cpu", 8.0, 4.0, 0.25, 7)
    assert scaler.state_dict() == {
        **GradScaler("cpu", 8.0, 4.0, 0.25, 7).state_dict(),
        "_hysteresis_tracker": 1,
        "_overflows_at_floor": 0,
    }


def test_without_a_device_it_takes_the_one_there_is() -> None:
    kind = torch.accelerator.current_accelerator(check_available=True)
    assert DynamicLossScaler()._device == ("cpu" if kind is None else kind.type)
    assert DynamicLossScaler(init_scale=4.0).is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_disabled_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = DynamicLossScaler("cuda")
    assert not scaler.is_enabled()


def test_nested_outputs_are_scaled() -> None:
    one = torch.ones(())
    scaler = cpu(init_scale=4.0)
    a, (b, c) = scaler.scale([one, (one, one * 2)])
    assert [a.item(), b.item(), c.item()] == [4.0, 4.0, 8.0]
    assert [t.item() for t in scaler.scale(t for t in (one, one))] == [4.0, 4.0]


def test_arguments_and_result_of_step_are_passed_on() -> None:
    class Loud(SGD):
        def step(self, number: int = 0, *, closure: Any = None, name: str = "") -> Any:
            super().step()
            return number, name

    weight = nn.Parameter(torch.ones(3))
    training = Training(cpu(), Loud([weight], lr=0.1))
    training.scaler.scale(weight.sum()).backward()
    assert training.scaler.step(training.optimizer, 3, name="x") == (3, "x")


@pytest.mark.parametrize("by_name", [True, False])
def test_closures_are_refused(by_name: bool) -> None:
    training = Training(cpu())
    training.scaler.scale(training.weight.sum()).backward()
    given: Any = {"closure": lambda: 1.0} if by_name else {}
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        training.scaler.step(training.optimizer, *([] if by_name else [lambda: 1.0]), **given)
    assert training.weight.tolist() == [1.0] * 3


def test_closure_is_refused_also_where_the_step_would_be_skipped() -> None:
    weight = nn.Parameter(torch.ones(3))
    training = Training(cpu(), SGD([weight], lr=0.1, momentum=0.9, fused=True))
    training.scaler.scale((weight * math.inf).sum()).backward()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        training.scaler.step(training.optimizer, closure=lambda: 1.0)


def misuses() -> dict[str, Any]:
    def twice(scaler: Any, optimizer: Optimizer) -> None:
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)

    def stepped_twice(scaler: Any, optimizer: Optimizer) -> None:
        scaler.step(optimizer)
        scaler.step(optimizer)

    def unscaled_after(scaler: Any, optimizer: Optimizer) -> None:
        scaler.step(optimizer)
        scaler.unscale_(optimizer)

    return {f.__name__: f for f in (twice, stepped_twice, unscaled_after)} | {
        "update_alone": lambda scaler, optimizer: scaler.update(),
    }


@pytest.mark.parametrize("name", misuses())
@pytest.mark.parametrize("fused", [True, False])
def test_misuse_is_refused_in_torchs_words(name: str, fused: bool) -> None:
    said = []
    for scaler in (cpu(), GradScaler("cpu")):
        weight = nn.Parameter(torch.ones(3))
        optimizer = SGD([weight], lr=0.1, fused=fused)
        scaler.scale(weight.sum()).backward()
        with pytest.raises((RuntimeError, AssertionError)) as caught:
            misuses()[name](scaler, optimizer)
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("call", [lambda s, o: s.step(o), lambda s, o: s.update()])
def test_use_before_anything_was_scaled_is_refused_in_torchs_words(call: Any) -> None:
    optimizer = SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(AssertionError, match="_scale is None"):
        call(cpu(), optimizer)


def test_disabled_scaler_does_nothing() -> None:
    scaler = DynamicLossScaler("cpu", enabled=False)
    weight = nn.Parameter(torch.ones(3))
    optimizer = SGD([weight], lr=0.5)
    loss = weight.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer, closure=None)
    scaler.update()
    assert weight.tolist() == [0.5] * 3
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


@pytest.mark.parametrize(
    ("new", "scale"),
    [(64.0, 64.0), (7, 7.0), (0.0, 1.0), (-3.0, 1.0), (math.inf, 2.0**32), (1e30, 2.0**32)],
)
@pytest.mark.parametrize("make", [lambda x: x, lambda x: torch.tensor(float(x))])
def test_new_scale_is_brought_within_the_bounds(new: Any, scale: float, make: Any) -> None:
    training = Training(cpu())
    training.attempt("inf")
    training.scaler.update(make(new))
    assert training.scaler.get_scale() == scale
    training.step()  # the step before is over
    assert training.scaler.get_scale() == scale


def test_new_scale_that_is_nan_is_refused() -> None:
    training = Training(cpu())
    training.attempt()
    with pytest.raises(ConfigError, match="NaN"):
        training.scaler.update(math.nan)
    assert training.scaler.get_scale() == 2.0**16


def test_later_changes_to_a_tensor_given_as_scale_do_not_matter() -> None:
    training = Training(cpu())
    training.attempt()
    training.scaler.update(scale := torch.tensor(8.0))
    scale.fill_(math.nan)
    assert training.scaler.get_scale() == 8.0


def test_setters_change_what_they_name() -> None:
    scaler = cpu()
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (4.0, 0.25)
    assert after(scaler, "good", "inf", "inf") == 2.0**14


@pytest.mark.parametrize("started", [True, False])
def test_shorter_interval_than_the_good_steps_so_far_still_lets_the_scale_grow(
    started: bool,
) -> None:
    scaler = cpu(growth_interval=100)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 50})
    if started:
        after(scaler, "good")
    scaler.set_growth_interval(10)
    assert after(scaler, "good") == 2.0**17


# Saved states


def busy(**options: Any) -> DynamicLossScaler:
    """A scaler in the middle of everything it counts."""
    scaler = cpu(init_scale=2.0, hysteresis=3, floor_patience=100, growth_interval=9, **options)
    after(scaler, "inf", "inf", "inf", "good", "good", "inf", "good", "good")
    assert scaler.state_dict()["_growth_tracker"] == 2
    return scaler


def test_loaded_scaler_goes_on_where_the_saved_one_was() -> None:
    saved = busy()
    loaded = cpu(hysteresis=3)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.state_dict() == saved.state_dict()
    after(loaded, "good")  # now on its device
    loaded.load_state_dict(saved.state_dict())
    assert loaded.state_dict() == saved.state_dict()
    assert after(loaded, "inf", "inf", *["good"] * 9) == after(saved, "inf", "inf", *["good"] * 9)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copied_scaler_goes_on_where_the_first_one_was(copied: Any) -> None:
    first = busy(hysteresis_mode="consecutive")
    second = copied(first)
    assert second.state_dict() == first.state_dict()
    assert vars(second).keys() == vars(first).keys()
    assert second.hysteresis_mode == "consecutive"
    after(second, "inf")
    assert second.state_dict() != first.state_dict()


def test_pickling_in_the_middle_of_a_step_is_refused_as_torch_does() -> None:
    training = Training(cpu())
    training.attempt()
    with pytest.raises(AssertionError, match="may only be pickled"):
        pickle.dumps(training.scaler)


@pytest.mark.parametrize("started", [True, False])
def test_states_go_to_torch_and_back(started: bool) -> None:
    theirs = GradScaler("cpu", init_scale=8.0, growth_interval=9)
    after(theirs, "good", "inf", "good", "good")
    ours = cpu()
    if started:
        after(ours, "inf")
    ours.load_state_dict(theirs.state_dict())
    assert {key: ours.state_dict()[key] for key in theirs.state_dict()} == theirs.state_dict()
    back = GradScaler("cpu")
    back.load_state_dict(ours.state_dict())
    assert back.state_dict() == theirs.state_dict()


@pytest.mark.parametrize(("scale", "loaded"), [(0.0, 1.0), (1e-40, 1.0), (2.0**127, 2.0**32)])
def test_scale_of_a_collapsed_run_is_brought_within_the_bounds(scale: float, loaded: float) -> None:
    training = Training(cpu())
    training.scaler.load_state_dict(GradScaler("cpu", init_scale=scale).state_dict())
    assert training.scaler.get_scale() == loaded
    training.step()
    assert training.is_finite()


def test_loaded_tolerance_is_at_most_the_own() -> None:
    scaler = cpu(hysteresis=2)
    scaler.load_state_dict(cpu(hysteresis=9).state_dict())
    assert after(scaler, "inf", "inf") == 2.0**15


def test_loaded_scaler_that_missed_its_interval_grows_all_the_same() -> None:
    scaler = cpu()
    saved = GradScaler("cpu", growth_interval=3).state_dict()
    scaler.load_state_dict({**saved, "_growth_tracker": 7})  # the interval was set while it ran
    assert after(scaler, "good") == 2.0**17


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("how", ["snapshot", "mark"])
def test_everything_it_counts_is_part_of_the_training_state(started: bool, how: str) -> None:
    scaler = busy() if started else cpu(init_scale=1.0, hysteresis=2, floor_patience=100)
    training = Training(scaler)
    state = TrainingState(nn.Module(), training.optimizer, scaler=scaler)
    saved = state.capture() if how == "snapshot" else state.mark()
    before = scaler.state_dict()
    for event in ("inf", "inf", "inf", "good"):
        training.step(event)
    training.attempt("inf")
    assert scaler.state_dict() != before
    state.restore(saved) if isinstance(saved, Snapshot) else state.go_back(saved)
    assert scaler.state_dict() == before
    training.step()  # the step that was undone is not still under way


def test_loading_a_state_ends_the_step_that_was_under_way() -> None:
    training = Training(cpu())
    training.step()
    saved = training.scaler.state_dict()
    training.attempt("inf")
    training.scaler.load_state_dict(saved)
    training.step()
    assert training.scaler.get_scale() == 2.0**16


def test_empty_state_is_refused_in_torchs_words() -> None:
    with pytest.raises(RuntimeError, match="state dict is empty"):
        cpu().load_state_dict({})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"scale": math.nan}, ConfigError, "NaN"),
        ({"growth_factor": 1.0}, ConfigError, "growth_factor is 1.0"),
        ({"backoff_factor": 0.0}, ConfigError, "backoff_factor is 0.0"),
        ({"growth_interval": 0}, ConfigError, "growth_interval is 0"),
    ],
)
def test_state_that_cannot_be_is_refused_as_a_whole(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    scaler = busy()
    before = scaler.state_dict()
    with pytest.raises(error, match=words):
        scaler.load_state_dict({**GradScaler("cpu").state_dict(), **change})
    assert scaler.state_dict() == before


def test_state_of_something_else_is_refused() -> None:
    with pytest.raises(RecordError, match="growth_factor, backoff_factor"):
        cpu().load_state_dict({"scale": 1.0, "cur_iter": 3})


# Settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"growth_factor": 1.0}, "set max_scale to init_scale"),
        ({"growth_factor": math.inf}, "growth_factor is inf"),
        ({"growth_factor": math.nan}, "growth_factor is nan"),
        ({"backoff_factor": 1.0}, "set min_scale to init_scale"),
        ({"backoff_factor": 0.0}, "backoff_factor is 0.0"),
        ({"growth_interval": 0}, "growth_interval is 0"),
        ({"growth_interval": 2.5}, "growth_interval is 2.5"),
        ({"hysteresis": 0}, "hysteresis is 0"),
        ({"floor_patience": 0}, "floor_patience is 0"),
        ({"min_scale": 0.0}, "min_scale is 0.0"),
        ({"min_scale": 8.0, "max_scale": 4.0}, "in this order"),
        ({"max_scale": math.inf}, "max_scale is inf"),
        ({"min_scale": math.nan}, "min_scale is nan"),
        ({"init_scale": 0.5}, "init_scale is 0.5"),
        ({"init_scale": math.nan}, "init_scale is nan"),
        ({"hysteresis_mode": "never"}, "'interval' or 'consecutive'"),
        ({"on_floor": "cry"}, "'warn', 'abort' or a callable"),
        ({"device": 65536.0}, "device is 65536.0"),
    ],
)
def test_setting_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DynamicLossScaler(**{"device": "cpu", **options})


@pytest.mark.parametrize(
    ("setter", "value"),
    [("growth_factor", 0.5), ("backoff_factor", 2.0), ("growth_interval", 0)],
)
def test_setters_refuse_what_the_constructor_refuses(setter: str, value: float) -> None:
    with pytest.raises(ConfigError, match=setter):
        getattr(cpu(), f"set_{setter}")(value)


@pytest.mark.parametrize(
    ("low", "high", "factor", "bounds"),
    [
        (100.0, 1e6, 2.0, (128.0, 2.0**19)),
        (100.0, 1e6, 3.0, (100.0, 1e6)),
        (2.0**-3, 2.0**20, 2.0, (2.0**-3, 2.0**20)),
    ],
)
def test_bounds_are_narrowed_to_powers_of_two_where_the_rest_is(
    low: float, high: float, factor: float, bounds: tuple[float, float]
) -> None:
    scaler = cpu(init_scale=1024.0, min_scale=low, max_scale=high, growth_factor=factor)
    assert (scaler.min_scale, scaler.max_scale) == bounds


def test_scale_can_be_fixed() -> None:
    scaler = cpu(init_scale=1000.0, min_scale=1000.0, max_scale=1000.0, growth_interval=1)
    assert after(scaler, "good", "inf", "good") == 1000.0


def tensors(scaler: DynamicLossScaler) -> list[Tensor]:
    held = [scaler._scale, scaler._growth_tracker, scaler._tolerance, scaler._at_floor]
    return [t for t in held if t is not None]


def test_everything_it_holds_is_where_the_losses_are() -> None:
    scaler = cpu()
    after(scaler, "inf")
    assert {t.device for t in tensors(scaler)} == {torch.device("cpu")}
    assert not any(t.requires_grad for t in tensors(scaler))
