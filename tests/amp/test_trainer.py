"""AMPTrainer.training_step: as the plain loop when healthy, None when a step was left out."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from as_before import attached
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from training import (
    Heard,
    all_steps,
    batches,
    by_hand,
    config,
    mse,
    raw,
    recovering,
    small_model,
    trainer_of,
    without,
)

from stayfinite.amp.config import AMPConfig
from stayfinite.amp.trainer import AMPTrainer
from stayfinite.errors import ConfigError, InputError
from stayfinite.records import Forecast
from stayfinite.report.alerts import Alert, AlertRule
from stayfinite.text import forecast_line


@pytest.mark.parametrize("every", [1, 3])
def test_healthy_run_is_the_plain_loop_by_bytes(every: int) -> None:
    plain, ours, made = small_model(), small_model(), batches(24)
    torch.manual_seed(7)
    expected = by_hand(plain, made, every=every)
    torch.manual_seed(7)
    with trainer_of(config(accumulate_grad_batches=every), ours) as trainer:
        losses = all_steps(trainer, made)
        assert trainer.step == 24 // every
    assert losses == expected
    assert raw(ours) == raw(plain)


def test_clipping_brings_the_norm_down_as_in_a_plain_loop() -> None:
    plain, ours, made = small_model(), small_model(), batches(12)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    torch.manual_seed(7)
    for x, y in made:
        optimizer.zero_grad()
        mse(plain(x), y).backward()
        norm = torch.linalg.vector_norm(
            torch.stack([p.grad.double().norm() for p in plain.parameters()])
        ).item()
        for parameter in plain.parameters():
            if norm > 0.25:
                parameter.grad *= 0.25 / norm
        optimizer.step()
    torch.manual_seed(7)
    sgd = torch.optim.SGD(ours.parameters(), lr=0.05)
    with AMPTrainer(config(gradient_clip_val=0.25), ours, sgd, mse) as trainer:
        all_steps(trainer, made)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_bad_batch_is_as_if_it_had_not_been(precision: str) -> None:
    made = batches(12, bad=(5,))
    plain, ours = small_model(), small_model()
    given = config(precision, loss_scale=1024.0 if precision == "fp16" else None)
    torch.manual_seed(7)
    with trainer_of(given, plain) as trainer:
        all_steps(trainer, without(made, 5))
    torch.manual_seed(7)
    with trainer_of(given, ours) as trainer:
        losses = all_steps(trainer, made)
        assert [n for n, loss in enumerate(losses) if loss is None] == [5]
        assert trainer.step == 11
        assert len(trainer.incidents) == 1
    assert raw(ours) == raw(plain)


def test_bad_batch_spoils_its_window_only() -> None:
    made = batches(12, bad=(4,))
    plain, ours = small_model(), small_model()
    torch.manual_seed(7)
    by_hand(plain, without(made, 3, 4, 5), every=3)
    torch.manual_seed(7)
    with trainer_of(config(accumulate_grad_batches=3), ours) as trainer:
        losses = all_steps(trainer, made)
        assert trainer.step == 3
        assert len(trainer.incidents) == 1
    assert [n for n, loss in enumerate(losses) if loss is None] == [4, 5]
    assert raw(ours) == raw(plain)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_learns(precision: str) -> None:
    model, made = nn.Linear(4, 1), batches(150)
    with trainer_of(config(precision), model) as trainer:
        losses = [loss for loss in all_steps(trainer, made) if loss is not None]
    assert losses[-1] < 0.05 * losses[0]


def test_precision_is_that_of_the_forward_pass() -> None:
    seen: list[torch.dtype] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return mse(output.float(), target)

    for precision in ("fp32", "bf16", "fp16"):
        with trainer_of(config(precision), nn.Linear(4, 1), loss_fn=loss_fn) as trainer:
            all_steps(trainer, batches(1))
    assert seen == [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("precision", "loss_scale", "expected"),
    [
        ("fp16", None, 2.0**16),
        ("bf16", None, None),
        ("fp32", None, None),
        ("fp32", "dynamic", 2.0**16),
        ("fp16", 128.0, 128.0),
    ],
)
def test_loss_scale_is_what_was_asked_for(
    precision: str, loss_scale: Any, expected: float | None
) -> None:
    given = config(precision, loss_scale=loss_scale)
    with trainer_of(given, nn.Linear(4, 1)) as trainer:
        assert (trainer.scaler and trainer.scaler.get_scale()) == expected


def test_fixed_scale_stays_though_a_step_overflows() -> None:
    with trainer_of(config("fp16", loss_scale=2.0**24), nn.Linear(4, 1)) as trainer:
        losses = all_steps(trainer, batches(3))
        assert trainer.scaler is not None
        assert trainer.scaler.get_scale() == 2.0**24
        assert losses == [None] * 3
        assert trainer.step == 0
        assert trainer.incidents == []


def test_loss_is_that_of_the_batch_and_detached() -> None:
    model = nn.Linear(4, 1)
    x, y = batches(1)[0]
    expected = mse(model(x), y).item()
    with trainer_of(config("fp32", accumulate_grad_batches=4), model) as trainer:
        loss = trainer.training_step((x, y))
    assert loss is not None
    assert loss.item() == expected
    assert not loss.requires_grad


class OwnLoss(nn.Module):
    """Turns a batch into a loss by itself, in the form that is asked for."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(4, 1), form

    def forward(self, x: Tensor, y: Tensor) -> Any:
        output = self.layer(x)
        loss = mse(output, y)
        if self.form == "attribute":
            return type("Output", (), {"loss": loss, "logits": output})()
        forms = {
            "tensor": loss,
            "mapping": {"loss": loss, "logits": output},
            "terms": {"near": 0.5 * loss, "far": 0.5 * loss, "accuracy": 3},
            "terms and loss": {"near": loss, "seen": loss.detach() * math.nan, "loss": loss},
        }
        return forms[self.form]


@pytest.mark.parametrize("form", ["tensor", "attribute", "mapping", "terms", "terms and loss"])
@pytest.mark.parametrize("as_mapping", [True, False])
def test_model_may_make_its_own_loss(form: str, as_mapping: bool) -> None:
    torch.manual_seed(0)
    model = OwnLoss(form)
    x, y = batches(1)[0]
    expected = mse(model.layer(x), y).item()
    with trainer_of(config(), model, loss_fn=None) as trainer:
        loss = trainer.training_step({"x": x, "y": y} if as_mapping else (x, y))
    assert loss is not None
    assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("batch", "loss_fn", "said"),
    [
        (torch.ones(2, 4), mse, r"the batch is a Tensor; .* \(inputs, targets\)"),
        ((torch.ones(2, 4),), mse, "the batch is a tuple of 1"),
        (batches(1)[0], lambda p, t: (p - t) ** 2, r"shape \[8, 1\].*with .mean"),
        (batches(1)[0], lambda p, t: 3.0, "loss_fn returned a float"),
        (batches(1)[0], lambda p, t: {"logits": p}, "returned a mapping of logits"),
    ],
)
def test_unknown_form_is_a_clear_error(batch: Any, loss_fn: Any, said: str) -> None:
    with (
        trainer_of(config(), nn.Linear(4, 1), loss_fn=loss_fn) as trainer,
        pytest.raises(InputError, match=said),
    ):
        trainer.training_step(batch)


@pytest.mark.parametrize("wrong", ["config", "model", "optimizer"])
def test_wrong_kind_is_named(wrong: str) -> None:
    model = nn.Linear(4, 1)
    parts = {
        "config": AMPConfig(),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        wrong: 3,
    }
    with pytest.raises(InputError, match=f"{wrong} is a int"):
        AMPTrainer(**parts)  # type: ignore[arg-type]


def test_ema_follows_each_update_and_no_skipped_one() -> None:
    made = batches(10, bad=(3, 4))
    plain, ours = small_model(), small_model()
    plain_ema, ema = AveragedModel(plain), AveragedModel(ours)
    torch.manual_seed(7)
    by_hand(plain, without(made, 3, 4), follow=lambda m, o: plain_ema.update_parameters(m))
    torch.manual_seed(7)
    with trainer_of(config(), ours, ema=ema) as trainer:
        all_steps(trainer, made)
    assert raw(ema) == raw(plain_ema)
    assert ema.n_averaged == 8


def test_ema_that_cannot_be_updated_is_refused() -> None:
    with pytest.raises(InputError, match="ema is a int; it must have update_parameters"):
        trainer_of(config(), nn.Linear(4, 1), ema=3)


def test_scheduler_follows_each_update_and_no_skipped_one() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    made = batches(6, bad=(2,))
    with AMPTrainer(config(), model, optimizer, mse, scheduler) as trainer:
        all_steps(trainer, made)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5**5)


def test_scheduler_does_not_follow_a_scaler_skip() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    given = config("fp16", loss_scale=2.0**24)
    with AMPTrainer(given, model, optimizer, mse, scheduler) as trainer:
        all_steps(trainer, batches(3))
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_unknown_scheduler_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scheduler_every is 'day'; .* 'update' or 'epoch'"):
        trainer_of(config(), nn.Linear(4, 1), scheduler_every="day")


def test_trainer_that_is_dropped_leaves_torch_as_it_was() -> None:
    before = attached()
    trainer = trainer_of(config(), small_model(), callbacks=[Heard()])
    all_steps(trainer, batches(3, bad=(2,)))
    assert attached() != before
    del trainer
    gc.collect()
    assert attached() == before


def test_closing_twice_is_harmless() -> None:
    trainer = trainer_of(config(clamp_activations=1.0), small_model())
    trainer.close()
    trainer.close()


def test_window_begins_again_after_an_error_of_the_user() -> None:
    made = batches(5)
    plain, ours = nn.Linear(4, 1), nn.Linear(4, 1)
    ours.load_state_dict(plain.state_dict())
    by_hand(plain, made[2:4], every=2)
    calls = iter(range(10))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) == 1:
            raise RuntimeError("of the user's own")
        return mse(output, target)

    with trainer_of(config(accumulate_grad_batches=2), ours, loss_fn=loss_fn) as trainer:
        trainer.training_step(made[0])
        with pytest.raises(RuntimeError, match="own"):
            trainer.training_step(made[1])
        all_steps(trainer, made[2:4])
        assert trainer.step == 1
    assert raw(ours) == raw(plain)


def test_batch_of_nested_tensors_is_moved() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, pair: dict[str, list[Tensor]]) -> Tensor:
            return self.layer(pair["both"][0])

    x, y = batches(1)[0]
    with trainer_of(config(device="cpu"), Named()) as trainer:
        assert trainer.training_step(({"both": [x, x]}, y)) is not None


class Pulled(nn.Module):
    """Words that a loss without a bound makes larger and larger."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 16)

    def forward(self, a: Tensor) -> Tensor:
        return -(self.words(a) @ self.words((a + 1) % 24).T).diagonal().mean()


def test_alerts_callbacks_and_the_log_are_told_of_forecasts_and_what_was_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Forecast] = []

    class Listener:
        def on_forecast(self, forecast: Forecast) -> None:
            heard.append(forecast)

    torch.manual_seed(0)
    torch._dynamo.utils.counters.clear()  # activations are not measured beside what is compiled
    model, generator = Pulled(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    told: list[Alert] = []
    with AMPTrainer(
        config("fp16", detect={"recovery": recovering(on_forecast="clip", grad_clip_value=100.0)}),
        model,
        optimizer,
        callbacks=[Listener()],
        alerts=[AlertRule(told.append, cooldown=0)],
        forecast=True,
    ) as trainer:
        while not trainer.incidents and trainer.step < 400:
            trainer.training_step((torch.randint(24, (32,), generator=generator),))
    about = [each for each in told if each.forecast is not None]
    assert about[0].forecast is heard[0]
    assert "overflows float16 in about" in about[0].title
    assert about[0].title.endswith("; clip: gradients are clipped to a norm of 100")
    assert forecast_line(heard[0]) in caplog.messages
    assert [each.incident.step for each in told if each.incident] == [trainer.incidents[0].step]
