"""What is done about forecasts and spikes: when, for how long, and that nothing else is changed."""

from __future__ import annotations

import copy
import itertools
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, StepLR

import stayfinite
from stayfinite import AMPConfig, AMPTrainer
from stayfinite.amp.config import NaNDetectionConfig
from stayfinite.errors import ConfigError
from stayfinite.guard.job import Job, Parts
from stayfinite.guard.ranks import EarlyLooks, Ranks
from stayfinite.integrations.shared import watch_options
from stayfinite.prevent.forecast.forecaster import Forecaster
from stayfinite.prevent.forecast.outlook import Outlook, Row, TrendRules
from stayfinite.records import Forecast
from stayfinite.recover.config import RecoveryConfig
from stayfinite.recover.manager import NaNRecoveryManager

AT = 60  # the step of a forecast that is given


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))


def divergence(**given: Any) -> Forecast:
    return Forecast(
        **{"step": AT, "signal": "divergence", "steps_left": 84, "message": "it diverges", **given}
    )


def overflow(where: str = "") -> Forecast:
    return Forecast(step=AT, signal="activation", where=where, dtype="float16")


def tell(
    monkeypatch: pytest.MonkeyPatch,
    *told: Forecast,
    room: Callable[[int], float] = lambda step: 1.0,
    of: torch.optim.Optimizer | None = None,
) -> None:
    """Have these forecasts made, and what they are of left with so much room in each step."""
    counts = {"step": -1}

    def stepped(self: Forecaster, optimizer: torch.optim.Optimizer, **seen: Any) -> list[Forecast]:
        if of is not None and optimizer is not of:
            return []
        counts["step"] += 1
        return [each for each in told if each.step == counts["step"]]

    monkeypatch.setattr(Forecaster, "stepped", stepped)
    monkeypatch.setattr(Forecaster, "room", lambda self, optimizer: room(counts["step"]))
    monkeypatch.setattr(Forecaster, "is_rising", lambda self, optimizer: True)


def job_of(model: nn.Module, config: RecoveryConfig, optimizer: Any = None) -> Job:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if optimizer is None else optimizer
    parts = Parts(optimizer=optimizer, modules=(model,))
    return Job(parts, config, NaNRecoveryManager(config))


class Used:
    """An SGD that notes the rates with which updates are made, and the gradients' norms."""

    def __init__(self, params: Any, lr: Any = 0.1, **more: Any) -> None:
        self.rates: list[float] = []
        self.norms: list[float] = []
        used, zero = self, torch.zeros(())

        class Noting(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                group = self.param_groups[0]
                grads = [p.grad for p in group["params"] if p.grad is not None] or [zero]
                used.rates.append(float(group["lr"]))
                used.norms.append(float(torch.stack([g.norm() for g in grads]).norm()))
                super().step(closure)

        self.optimizer = Noting(params, lr=lr, **more)


def run(
    config: RecoveryConfig,
    *,
    steps: int = 100,
    lr: Any = 0.1,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    is_given: bool = False,
    before: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None,
    after: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None,
) -> tuple[stayfinite.Guard, Used]:
    """A plain loop; `before` comes between its backward pass and its update."""
    model = small()
    used = Used(model.parameters(), lr=lr)
    optimizer = used.optimizer
    scheduler = None if schedule is None else schedule(optimizer)
    generator = torch.Generator().manual_seed(0)
    given = scheduler if is_given else None
    with stayfinite.watch(
        model, optimizer, scheduler=given, sinks=[], config=config, forecast=True, again="never"
    ) as guard:
        for step in range(steps):
            optimizer.zero_grad()
            x = torch.randn(16, 8, generator=generator)
            (model(x) - 3 * x[:, :1] * x[:, 1:2]).square().mean().backward()
            if before is not None:
                before(step, model, optimizer)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if after is not None:
                after(step, model, optimizer)
    return guard, used


def outcomes(guard: stayfinite.Guard) -> list[tuple[int, str]]:
    return [(each.step, each.outcome.strategy) for each in guard.forecasts if each.outcome]


LOWER = RecoveryConfig(on_forecast="lower_lr", lower_lr_goes_back=False)
BACK = RecoveryConfig(on_forecast="lower_lr", snapshot_every=20)


# Clipping.


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clipping_leaves_a_bad_step_an_incident(
    monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    def spoil(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        if step == 80:
            model[0].weight.grad[0, 0] = bad

    tell(monkeypatch, divergence())
    config = RecoveryConfig(on_forecast="clip", grad_clip_value=1e-3)
    guard, used = run(config, before=spoil)
    assert [each.step for each in guard.incidents] == [80]
    assert used.norms[70] == pytest.approx(1e-3, rel=1e-3)


def test_clipping_leaves_all_gradients_of_a_bad_step_as_they_are() -> None:
    model: Any = small()
    config = RecoveryConfig(on_forecast="clip", grad_clip_value=1e-3)
    job = job_of(model, config)
    job.precaution.answered(divergence())
    model(torch.ones(4, 8)).square().sum().backward()
    model[0].weight.grad[0, 0] = math.nan
    kept = model[1].weight.grad.clone()
    job.precaution.before_update()
    assert torch.equal(model[1].weight.grad, kept)
    assert bool(model[0].weight.grad[0, 0].isnan())


def test_clipping_counts_the_scale_that_a_fused_optimizer_divides_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = {}
    for fused in (False, True):
        tell(monkeypatch, divergence(step=5))
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        config = RecoveryConfig(on_forecast="clip", grad_clip_value=0.5)
        with stayfinite.watch(
            model, optimizer, scaler=scaler, sinks=[], config=config, forecast=True
        ):
            for _ in range(10):
                before = torch.cat([param.detach().flatten() for param in model.parameters()])
                optimizer.zero_grad()
                scaler.scale((model(torch.ones(4, 8)) - 50).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        after = torch.cat([param.detach().flatten() for param in model.parameters()])
        moved[fused] = float((after - before).norm())
    assert moved[False] == pytest.approx(0.01 * 0.5, rel=1e-3)
    assert moved[True] == pytest.approx(moved[False], rel=1e-4)


def test_gradients_are_clipped_until_the_trend_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, divergence())
    config = RecoveryConfig(on_forecast="clip", grad_clip_value=0.01)
    guard, used = run(config, steps=250)
    assert outcomes(guard) == [(AT, "clip"), (AT + 128, "undo")]
    assert used.norms[AT] > 0.02
    assert used.norms[AT + 1 : AT + 129] == pytest.approx([0.01] * 128, rel=1e-2)
    assert max(used.norms[AT + 129 :]) > 0.02


def test_gradients_are_said_to_be_clipped_already_only_if_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell(
        monkeypatch,
        divergence(step=50, signal="loss_spike", where="loss"),
        divergence(),
        divergence(step=70),
    )
    config = RecoveryConfig(on_forecast="clip", on_spike="lower_lr")
    guard, used = run(config)
    said = [each.outcome.detail for each in guard.forecasts if each.outcome]
    assert said[1:] == [
        "gradients are clipped to a norm of 1",
        "not possible: gradients are clipped already, to a norm of 1",
    ]
    assert used.rates[65] == 0.025
    # What is closed leaves the rate low, and clips no more.
    assert used.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


# The rate.


def test_rate_is_given_back_in_parts_and_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, divergence())
    guard, used = run(LOWER, steps=400)
    changes = [step for step in range(1, 400) if used.rates[step] != used.rates[step - 1]]
    assert changes == [AT + 1, AT + 129, AT + 257]
    assert [used.rates[step] for step in changes] == pytest.approx([0.025, 0.05, 0.1])
    assert used.rates[-1] == 0.1
    assert used.optimizer.param_groups[0]["lr"] == 0.1
    assert [what for _, what in outcomes(guard)] == ["lower_lr", "undo", "undo"]


def test_rate_stays_lowered_when_the_guard_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, divergence())
    _, used = run(LOWER, schedule=lambda optimizer: StepLR(optimizer, 1000), is_given=True)
    assert used.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.parametrize("ladder", ["rewind", "reset"])
def test_rate_is_never_above_the_users_after_a_recovery(
    monkeypatch: pytest.MonkeyPatch, ladder: str
) -> None:
    def spoil(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        if step == 100:
            model[0].weight.grad.fill_(math.nan)

    tell(monkeypatch, divergence())
    config = RecoveryConfig(
        on_forecast="lower_lr",
        ladder=[(ladder, 5)],  # type: ignore[arg-type]
        snapshot_every=20,
        snapshot_slots=4,
        rewind_snapshots=3,
        rewind_skip_batches=0,
    )
    guard, used = run(config, steps=500, before=spoil)
    assert len(guard.incidents) == 1
    assert max(used.rates) == 0.1
    assert used.rates[110] == 0.025
    assert used.rates[-1] == 0.1


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: LinearLR(optimizer, 0.01, total_iters=50),
        lambda optimizer: StepLR(optimizer, 55, 0.01),
        lambda optimizer: CosineAnnealingLR(optimizer, 400),
    ],
)
def test_schedule_goes_on_and_each_update_has_its_part(
    monkeypatch: pytest.MonkeyPatch, schedule: Any, is_back: bool, is_given: bool
) -> None:
    rates: dict[bool, list[float]] = {}
    for is_told in (False, True):
        tell(monkeypatch, *([divergence()] if is_told else []))
        config = BACK if is_back else LOWER
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch's own of schedules, too
            guard, used = run(config, steps=380, schedule=schedule, is_given=is_given)
        rates[is_told] = used.rates
    parts = [0.25] * 128 + [0.5] * 128 + [1.0] * (380 - AT - 1 - 256)
    assert rates[True][: AT + 1] == rates[False][: AT + 1]
    expected = [part * rate for part, rate in zip(parts, rates[False][AT + 1 :], strict=True)]
    assert rates[True][AT + 1 :] == pytest.approx(expected)
    first = guard.forecasts[0].outcome
    assert first is not None
    now = rates[False][AT]
    assert ("back at the snapshot" in first.detail) == is_back
    said = f"updates are made with 0.25 of the learning rate, {now / 4:.3g} instead of {now:.3g}"
    assert first.detail.endswith(said)


def test_rate_that_the_loop_sets_is_lowered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_rate(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 + 0.001 * step

    tell(monkeypatch, divergence())
    _, used = run(BACK, before=set_rate)
    assert used.rates[AT] == 0.1 + 0.001 * AT
    assert used.rates[AT + 1 :] == [(0.1 + 0.001 * step) * 0.25 for step in range(AT + 1, 100)]


def test_rate_in_a_tensor_is_lowered_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = torch.tensor(0.1)
    seen: list[bool] = []

    def look(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        seen.append(group["lr"] is rate and bool(rate == torch.tensor(0.1)))

    tell(monkeypatch, divergence())
    _, used = run(LOWER, lr=rate, after=look)
    assert all(seen)
    assert used.rates[-1] == pytest.approx(0.025)


def test_forecaster_hears_of_the_rate_with_which_updates_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell(monkeypatch, divergence())
    told, heard = Forecaster.stepped, list[Any]()

    def stepped(self: Any, optimizer: Any, **seen: Any) -> Any:
        heard.append(seen["rate"])
        return told(self, optimizer, **seen)

    monkeypatch.setattr(Forecaster, "stepped", stepped)
    run(LOWER, steps=AT + 3)
    assert heard == [None] * (AT + 1) + [0.025] * 2


def test_lbfgs_and_rates_of_none_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for make, reason in (
        (torch.optim.LBFGS, "LBFGS reads"),
        (torch.optim.Adafactor, ""),
        (lambda params: torch.optim.SGD(params, lr=0.0), "no learning rate above 0"),
    ):
        model = small()
        job = job_of(model, LOWER, make(model.parameters()))
        outcome = job.precaution.answered(divergence()).outcome
        assert outcome is not None
        assert reason in outcome.detail
        assert outcome.detail.startswith("not possible") == bool(reason)


def test_update_with_a_closure_is_made_with_the_lower_rate_and_leaves_the_rate_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tell(monkeypatch, divergence(step=3))
    moved, seen = list[float](), set[float]()

    def closure() -> Tensor:
        seen.add(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(4, 8)).sum()
        loss.backward()
        return loss

    with stayfinite.watch(model, optimizer, sinks=[], config=LOWER, forecast=True):
        for _ in range(6):
            before = model[1].bias.detach().clone()
            optimizer.step(closure)
            seen.add(optimizer.param_groups[0]["lr"])
            moved.append(float((before - model[1].bias).detach()))
    assert seen == {0.1}
    assert moved == pytest.approx([0.4] * 4 + [0.1] * 2)


def test_rate_is_the_users_again_after_a_step_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, divergence(step=3))
    model = small()
    used = Used(model.parameters())
    optimizer: Any = used.optimizer
    with stayfinite.watch(model, optimizer, sinks=[], config=LOWER, forecast=True):
        for step in range(8):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            if step == 5:
                with pytest.raises(TypeError):
                    optimizer.step(1, 2)
            else:
                optimizer.step()
    assert used.rates == [0.1] * 4 + [0.025] * 3


# While the trend goes on, and when it comes back.


def test_plateau_and_noise_are_no_rise_and_all_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The score rises for a while, then stays where it is, with noise."""
    noise = torch.rand(4000, generator=torch.Generator().manual_seed(0)).mul(1.5).tolist()
    tell(
        monkeypatch,
        divergence(),
        room=lambda step: -2.0 - 0.2 * (step - AT) if step < 120 else -14.0 + noise[step],
    )
    guard, used = run(BACK, steps=3000)
    done = [what for _, what in outcomes(guard)]
    cuts = done.count("lower_lr")
    assert 1 < cuts <= 6
    assert done == ["lower_lr"] * cuts + ["undo"] * (len(done) - cuts)
    assert used.rates[-1] == 0.1
    said = [each.outcome.detail for each in guard.forecasts if each.outcome]
    assert sum("back at the snapshot" in detail for detail in said) == 1
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(outcomes(guard)[cuts:])]
    assert set(gaps) == {128}


def test_what_comes_back_is_waited_for_four_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, divergence(), divergence(step=AT + 140))
    guard, _ = run(BACK, steps=AT + 140 + 600)
    assert outcomes(guard) == [
        (AT, "lower_lr"),
        (AT + 128, "undo"),
        (AT + 140, "lower_lr"),
        (AT + 140 + 512, "undo"),
    ]


def test_rise_after_an_undo_is_answered_before_it_is_as_high_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def room(step: int) -> float:
        return -10.0 if step < AT + 9 else 0.0 if step < AT + 140 else -1.0

    tell(monkeypatch, divergence(), room=room)
    guard, _ = run(LOWER, steps=AT + 200)
    assert outcomes(guard) == [(AT, "lower_lr"), (AT + 128, "undo"), (AT + 140, "lower_lr")]


def test_another_trend_much_later_is_undone_as_soon_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell(monkeypatch, divergence(), divergence(step=2000))
    guard, _ = run(LOWER, steps=2300)
    assert [step for step, what in outcomes(guard) if what == "undo"] == [
        *(AT + 128, AT + 256),
        *(2128, 2256),
    ]


def test_trend_that_is_not_seen_any_more_is_not_answered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell(monkeypatch, divergence(), room=lambda step: float(-step))
    monkeypatch.setattr(Forecaster, "is_rising", lambda self, optimizer: False)
    guard, _ = run(BACK, steps=150)
    assert outcomes(guard) == [(AT, "lower_lr")]


def test_a_divergence_rises_while_its_score_is_above_the_least() -> None:
    outlook = Outlook([Row(signal="activation", limit=65504.0)], TrendRules())
    assert not outlook.is_rising
    assert outlook.learned is not None
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        trend = type("Told", (), {"row": None})()
        patch.setattr(outlook, "_last_told", trend)
        outlook.score = outlook.learned.least + 0.1
        assert outlook.is_rising
        outlook.score = outlook.learned.least - 0.1
        assert not outlook.is_rising


def test_later_answers_say_only_what_is_known_then(monkeypatch: pytest.MonkeyPatch) -> None:
    first = divergence(value=2.5, slope=0.1, steps_low=3, steps_high=277, evidence=("much",))
    tell(monkeypatch, first, room=lambda step: 0.0 if step < 70 else -1.0)
    began = time.time()
    guard, _ = run(LOWER, steps=300)
    _, more, *undone = guard.forecasts
    assert more.message == "training: the trend goes on"
    assert undone[0].message == "training: the trend is gone; the last that was done is undone"
    for each in (more, *undone):
        assert each.time >= began
        assert each.evidence == ()
        assert {each.value, each.slope, each.steps_left, each.steps_low, each.steps_high} == {None}
        assert "84" not in each.message
    assert undone[0].outcome is not None
    assert "it has not risen since step" in undone[0].outcome.detail


# Going back.


def test_steps_are_counted_by_what_is_in_the_weights_or_by_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adam's step and good_steps go back; the trainer's step and the schedule do not."""
    tell(monkeypatch, divergence())
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = StepLR(optimizer, 50, 0.5)
    config = AMPConfig(precision="fp32", nan_detection=NaNDetectionConfig(recovery=BACK))
    loss = nn.functional.mse_loss
    with AMPTrainer(config, model, optimizer, loss, scheduler, forecast=True) as trainer:
        for _ in range(100):
            trainer.training_step((torch.randn(4, 8), torch.randn(4, 1)))
        assert trainer.guard is not None
        (job,) = trainer.guard.jobs.values()
        outcome = trainer.guard.forecasts[0].outcome
        assert outcome is not None
        assert "back at the snapshot of step 40" in outcome.detail
        state = optimizer.state[next(model.parameters())]
        assert job.good_steps == int(state["step"]) == 100 - (AT + 1 - 40)
        assert trainer.step == scheduler.last_epoch == 100


def test_checkpoint_that_is_loaded_has_its_own_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tell(monkeypatch, divergence())
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = AMPConfig(precision="fp32", nan_detection=NaNDetectionConfig(recovery=LOWER))
    loss = nn.functional.mse_loss
    with AMPTrainer(config, model, optimizer, loss, forecast=True) as trainer:
        for _ in range(80):
            trainer.training_step((torch.randn(4, 8), torch.randn(4, 1)))
        trainer.save(tmp_path / "kept.ckpt")
        trainer.load(tmp_path / "kept.ckpt")
        assert optimizer.param_groups[0]["lr"] == 0.01


def test_gradients_are_there_after_an_update_that_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def log(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        seen.append(all(param.grad is not None for param in model.parameters()))

    for config, told in (
        (BACK, divergence()),
        (RecoveryConfig(on_spike="rewind", rewind_skip_batches=0), divergence(signal="loss_spike")),
        (RecoveryConfig(on_forecast="raise_precision"), overflow("0")),
    ):
        tell(monkeypatch, told)
        guard, _ = run(config, steps=AT + 5, after=log)
        outcome = guard.forecasts[0].outcome
        assert outcome is not None
        assert not outcome.detail.startswith("not possible")
    assert all(seen)


def test_batches_and_random_numbers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[bool, list[float]] = {}
    for is_told in (False, True):
        tell(monkeypatch, *([divergence()] if is_told else []))
        torch.manual_seed(1)
        mine = drawn[is_told] = []
        run(BACK, steps=80, after=lambda *step, mine=mine: mine.append(float(torch.rand(()))))
    assert drawn[True] == drawn[False]


def test_weights_of_another_optimizer_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = small()
    ours = torch.optim.Adam(model[0].parameters(), lr=0.01)
    other = torch.optim.Adam(model[1].parameters(), lr=0.01)
    tell(monkeypatch, divergence(), of=ours)
    with stayfinite.watch(model, ours, sinks=[], config=BACK, forecast=True) as guard:
        for _ in range(AT + 3):
            ours.zero_grad()
            other.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            before = copy.deepcopy(model[1].state_dict())
            ours.step()
            assert all(torch.equal(before[key], new) for key, new in model[1].state_dict().items())
            other.step()
    (told,) = guard.forecasts
    assert told.outcome is not None
    assert told.outcome.detail == (
        "updates are made with 0.25 of the learning rate, 0.0025 instead of 0.01; "
        "no going back: another optimizer updates a part of the model"
    )


def test_steps_of_ours_go_back_with_their_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    tell(monkeypatch, divergence())

    def step(batch: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    with stayfinite.watch(model, optimizer, sinks=[], config=BACK, forecast=True) as guard:
        for number in range(90):
            guard.step(step, torch.randn(4, 8) * (math.nan if number == 80 else 1))
        (job,) = guard.jobs.values()
        state = optimizer.state[next(model.parameters())]
        assert job.good_steps == int(state["step"]) == 89 - (AT + 1 - 40)
    assert len(guard.incidents) == 1


# Precision.


@pytest.mark.parametrize("signal", ["divergence", "loss", "grad_norm", "loss_scale"])
def test_precision_is_not_raised_for_what_is_no_matter_of_it(
    monkeypatch: pytest.MonkeyPatch, signal: str
) -> None:
    tell(monkeypatch, divergence(signal=signal))
    guard, _ = run(RecoveryConfig(on_forecast="raise_precision"), steps=AT + 2)
    (told,) = guard.forecasts
    assert told.outcome is not None
    assert told.outcome.detail.startswith("not possible: ")
    assert told.outcome.detail.endswith("is no matter of one module's precision")


@pytest.mark.parametrize("is_closed", [False, True])
def test_module_runs_in_float32_until_the_trend_is_gone_or_the_guard_is_closed(
    *, is_closed: bool
) -> None:
    model: Any = small()
    config = RecoveryConfig(on_forecast="raise_precision")
    precaution = job_of(model, config).precaution

    def dtype() -> torch.dtype:
        seen: list[torch.dtype] = []
        handle = model[1].register_forward_hook(lambda *call: seen.append(call[2].dtype))
        with torch.autocast("cpu", dtype=torch.float16):
            model(torch.ones(2, 8))
        handle.remove()
        return seen[0]

    assert dtype() is torch.float16
    answer = precaution.answered(overflow("1"))
    assert answer.outcome is not None
    assert answer.outcome.strategy == "raise_precision"
    assert dtype() is torch.float32, answer.outcome.detail
    if is_closed:
        precaution.close()
    else:
        steps = range(AT + 1, AT + 400)
        later = [precaution.stepped(step, room=5.0, is_rising=False) for step in steps]
        assert len([each for each in later if each is not None]) == 1
    assert dtype() is torch.float16


# Spikes.


@pytest.mark.parametrize("on_spike", ["skip", "lower_lr", "rewind"])
def test_spike_of_anything_but_the_loss_is_only_told(
    monkeypatch: pytest.MonkeyPatch, on_spike: Any
) -> None:
    tell(monkeypatch, divergence(signal="grad_norm_spike"))
    guard, used = run(RecoveryConfig(on_spike=on_spike))
    assert outcomes(guard) == []
    assert set(used.rates) == {0.1}


def test_spike_does_not_hide_the_forecast_that_is_being_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spike = divergence(step=AT + 2, signal="loss_spike", where="loss")
    tell(monkeypatch, divergence(), spike, room=lambda step: -0.2 * max(0, min(step, 80) - AT))
    config = RecoveryConfig(on_forecast="lower_lr", on_spike="lower_lr", lower_lr_goes_back=False)
    guard, _ = run(config, steps=90)
    assert [each.message for each in guard.forecasts][2:3] == ["training: the trend goes on"]


def test_spike_is_skipped_where_that_is_asked_for_and_only_there() -> None:
    moved = {}
    for on_spike in (None, "skip"):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        config = RecoveryConfig(on_spike=on_spike)
        generator = torch.Generator().manual_seed(0)
        with stayfinite.watch(model, optimizer, sinks=[], config=config, forecast=True) as guard:
            for step in range(60):
                before = copy.deepcopy(model.state_dict())
                optimizer.zero_grad()
                x = torch.randn(16, 8, generator=generator)
                (model(x).square().mean() * (1000 if step == 50 else 1)).backward()
                optimizer.step()
                if step == 50:
                    after = model.state_dict()
                    moved[on_spike] = any(not torch.equal(before[k], after[k]) for k in before)
        (spike,) = [each for each in guard.forecasts if each.signal == "loss_spike"]
        assert spike.step == 50
        said = None if spike.outcome is None else spike.outcome.detail
        assert said == (None if on_spike is None else "the step was skipped")
        assert guard.incidents == []
    assert moved == {None: True, "skip": False}


def test_spike_is_answered_by_going_back_where_that_is_asked_for() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = RecoveryConfig(
        on_spike="rewind", snapshot_every=10, rewind_snapshots=0, rewind_skip_batches=0
    )
    generator, kept = torch.Generator().manual_seed(0), list[dict[str, Tensor]]()
    with stayfinite.watch(model, optimizer, sinks=[], config=config, forecast=True) as guard:
        for step in range(56):
            kept.append(copy.deepcopy(model.state_dict()))
            optimizer.zero_grad()
            x = torch.randn(16, 8, generator=generator)
            (model(x).square().mean() * (1000 if step == 55 else 1)).backward()
            optimizer.step()
    (spike,) = [each for each in guard.forecasts if each.signal == "loss_spike"]
    assert spike.outcome is not None
    assert spike.outcome.strategy == "rewind"
    after = model.state_dict()
    same = [n for n, old in enumerate(kept) if all(torch.equal(old[k], after[k]) for k in old)]
    assert same, spike.outcome.detail
    assert same[0] < 55


def scaled_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, factor: float
) -> None:
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(4, 8)).square().mean() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def test_going_back_leaves_a_scaler_that_its_loop_can_update() -> None:
    """Also to before its first step, where it had no scale yet."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    config = RecoveryConfig(on_spike="rewind", rewind_skip_batches=0)
    with stayfinite.watch(
        model, optimizer, scaler=scaler, sinks=[], config=config, forecast=True
    ) as guard:
        for step in range(42):
            scaled_step(model, optimizer, scaler, 1000.0 if step == 40 else 1.0)
    (spike,) = [each for each in guard.forecasts if each.signal == "loss_spike"]
    assert spike.outcome is not None
    assert "back at the snapshot of step 0" in spike.outcome.detail
    assert scaler.get_scale() == 4.0


# Where nothing can act.


@pytest.mark.parametrize("chosen", ["lower_lr", "clip", "raise_precision"])
def test_one_rank_of_many_does_nothing_about_its_own_forecast(chosen: Any) -> None:
    """The others have not foretold it, and would have other weights then."""
    model = small()
    config = RecoveryConfig(on_forecast=chosen, on_spike="lower_lr")
    job = job_of(model, config)
    job.ranks = Ranks((), is_replicated=True, is_pipeline=False, looks=EarlyLooks())
    for told in (overflow("1"), divergence(signal="loss_spike")):
        answer = job.precaution.answered(told)
        assert answer.outcome is not None
        assert answer.outcome.detail == "not possible: each rank would act by itself"
        assert not job.precaution.is_at_work


@pytest.mark.parametrize("name", ["on_forecast", "on_spike"])
def test_unknown_answer_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="'lower_lr'"):
        RecoveryConfig(**dict[str, Any]({name: "pray"}))


@pytest.mark.parametrize("name", ["on_forecast", "on_spike"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"forecast": False}, "forecast is False, so nothing is forecast; set forecast=True."),
        ({"on_nan": "warn", "forecast": True}, "with on_nan='warn' training is left alone;"),
        ({"on_nan": "stop", "forecast": True}, "with on_nan='stop' training is left alone;"),
    ],
)
def test_answer_that_can_never_be_given_is_refused(
    name: str, given: dict[str, Any], said: str
) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = RecoveryConfig(**dict[str, Any]({name: "lower_lr"}))
    with pytest.raises(ConfigError) as caught:
        stayfinite.watch(model, optimizer, config=config, sinks=[], **given)
    assert f"{name} is 'lower_lr', but {said}" in str(caught.value)
    assert str(caught.value).endswith(f"Or leave {name} None.")
    assert not optimizer._optimizer_step_post_hooks


def test_trainer_and_integrations_refuse_what_they_cannot_answer() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AMPConfig(precision="fp32", nan_detection=NaNDetectionConfig(recovery=LOWER))
    with pytest.raises(ConfigError, match="set forecast=True"):
        AMPTrainer(config, model, optimizer, nn.functional.mse_loss)
    none = {"check_loss": False, "check_gradients": False, "check_parameters": False}
    config = AMPConfig(nan_detection=NaNDetectionConfig(recovery=LOWER, **none))
    with pytest.raises(ConfigError, match="set check_loss=True"):
        AMPTrainer(config, model, optimizer, nn.functional.mse_loss, forecast=True)
    with pytest.raises(ConfigError, match="nothing is forecast here"):
        watch_options(LOWER, "recover", None, (), 0.0)
