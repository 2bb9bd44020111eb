"""What is not the trainer's own takes effect all the same: learning rate, warm-up, clamping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from training import all_steps, batches, config, mse, raw, small_model, trainer_of

from stayfinite.amp.config import AMPConfig
from stayfinite.amp.epoch import LinearWarmup, set_learning_rate
from stayfinite.amp.trainer import AMPTrainer
from stayfinite.errors import ConfigError


def test_learning_rate_of_a_config_is_that_of_the_run_by_bytes() -> None:
    made = batches(5)
    right, ours = small_model(), small_model()
    torch.manual_seed(7)
    with trainer_of(config(), right, lr=0.125) as trainer:
        all_steps(trainer, made)
    torch.manual_seed(7)
    given = AMPConfig.from_dict({"precision": "fp32", "optimizer.lr": 0.125})
    with trainer_of(given, ours, lr=99.0) as trainer:
        all_steps(trainer, made)
    assert raw(ours) == raw(right)


def test_groups_with_a_rate_of_their_own_keep_it() -> None:
    model = small_model()
    groups = [{"params": model[0].parameters()}, {"params": model[4].parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]


def test_rate_that_is_a_tensor_is_written_in_place() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(
        small_model().parameters(), lr=rate, capturable=False, foreach=False
    )
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_learning_rate_against_a_scheduler_is_refused() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ExponentialLR(optimizer, 0.9)
    with pytest.raises(ConfigError, match=r"learning_rate is 0\.5, but the scheduler .* lr=0\.1"):
        AMPTrainer(config(learning_rate=0.5), model, optimizer, mse, scheduler)
    AMPTrainer(config(learning_rate=0.1), model, optimizer, mse, scheduler).close()


def rates_during_fit(trainer: AMPTrainer, made: list[Any], epochs: int) -> list[float]:
    """The learning rate that each update was made with."""
    rates: list[float] = []
    hook = trainer.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: rates.append(optimizer.param_groups[0]["lr"])
    )
    trainer.fit(made, epochs=epochs)
    hook.remove()
    return rates


def test_warm_up_is_a_straight_line_over_its_epochs() -> None:
    given = config(warmup_epochs=2)
    with trainer_of(given, nn.Linear(4, 1), lr=0.8) as trainer:
        rates = rates_during_fit(trainer, batches(4), epochs=3)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8])


def test_warm_up_counts_updates_not_batches() -> None:
    given = config(warmup_epochs=1, accumulate_grad_batches=2, learning_rate=0.4)
    with trainer_of(given, nn.Linear(4, 1)) as trainer:
        rates = rates_during_fit(trainer, batches(7), epochs=2)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4])


def test_warm_up_waits_while_a_batch_is_skipped() -> None:
    given = config(warmup_epochs=1)
    with trainer_of(given, nn.Linear(4, 1), lr=0.4) as trainer:
        trainer.fit(batches(4, bad=(2,)))
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
        assert trainer.step == 3


def test_warm_up_without_known_length_asks_for_it() -> None:
    with (
        trainer_of(config(warmup_epochs=1), nn.Linear(4, 1)) as trainer,
        pytest.raises(ConfigError, match="give batches_per_epoch"),
    ):
        trainer.training_step(batches(1)[0])
    options = {"lr": 0.4, "batches_per_epoch": 4}
    with trainer_of(config(warmup_epochs=1), nn.Linear(4, 1), **options) as trainer:
        trainer.training_step(batches(1)[0])
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_warm_up_is_left_to_a_scheduler_that_is_given() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, step_size=100)
    with AMPTrainer(config(warmup_epochs=3), model, optimizer, mse, scheduler) as trainer:
        assert rates_during_fit(trainer, batches(2), epochs=1) == [0.5, 0.5]


def test_warm_up_leaves_the_rate_alone_when_it_is_over() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    warmup = LinearWarmup(optimizer, epochs=1)
    warmup.begin(2)
    warmup.step()
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.param_groups[0]["lr"] = 0.25
    warmup.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_scheduler_may_be_stepped_after_each_epoch() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ExponentialLR(optimizer, 0.5)
    with AMPTrainer(config(), model, optimizer, mse, scheduler, scheduler_every="epoch") as trainer:
        rates = rates_during_fit(trainer, batches(2), epochs=2)
    assert rates == [0.1, 0.1, 0.05, 0.05]


def test_plateau_scheduler_gets_the_loss_of_each_epoch() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
    )  # no later loss is so much better
    with AMPTrainer(config(), model, optimizer, mse, scheduler) as trainer:
        events = trainer.fit(batches(2), epochs=3)
    assert scheduler.best == pytest.approx(events[0].loss)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2


def test_clamped_training_survives_activations_that_overflow_half_precision() -> None:
    """A product of two linear outputs passes 65504, unless they are kept below 200."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) * self.two(x)

    def run(limit: float | None) -> tuple[list[float | None], int]:
        torch.manual_seed(0)
        made = [(x * 2000, y) for x, y in batches(4)]
        given = config("fp16", loss_scale=1.0, clamp_activations=limit)
        loss_fn = lambda p, t: mse(p.float() / 1e4, t)  # noqa: E731
        with trainer_of(given, Product(), lr=1e-4, loss_fn=loss_fn) as trainer:
            return all_steps(trainer, made), len(trainer.incidents)

    assert run(None)[1] > 0
    losses, incidents = run(200.0)
    assert incidents == 0
    assert None not in losses


def test_clamping_beyond_all_outputs_changes_no_byte() -> None:
    made = batches(5)
    plain, ours = small_model(), small_model()
    torch.manual_seed(7)
    with trainer_of(config(), plain) as trainer:
        all_steps(trainer, made)
    torch.manual_seed(7)
    with trainer_of(config(clamp_activations=1e6), ours) as trainer:
        all_steps(trainer, made)
    assert raw(ours) == raw(plain)
    assert trainer.clamp is not None
    assert {count.clamped for count in trainer.clamp.counts.values()} == {0}
    assert not any(module._forward_hooks for module in ours.modules())
