"""Before the first step: everything that is wrong, at once."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from training import all_steps, batches, config, mse, raw, small_model, trainer_of

from stayfinite.amp.trainer import AMPTrainer
from stayfinite.errors import TrainingSetupError


def problems_of(trainer: AMPTrainer, batch: Any = None) -> tuple[str, ...]:
    with trainer, pytest.raises(TrainingSetupError) as caught:
        trainer.training_step(batches(1)[0] if batch is None else batch)
    return caught.value.problems


def test_all_problems_are_told_at_once() -> None:
    model = small_model()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
        model[4].bias.fill_(math.inf)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = -1.0
    trainer = AMPTrainer(config(), model, optimizer, mse)
    problems = problems_of(trainer, batches(1, bad=(0,))[0])
    assert not any("inputs" in problem for problem in problems)
    for part in (
        "parameters.0.weight, which is in the model, holds NaN. Load a good checkpoint",
        "parameters.4.bias, which is in the model, holds Inf",
        "the optimizer holds none of the model's trainable parameters",
        "the learning rate of group 0 is -1; it must be above 0",
    ):
        assert any(part in problem for problem in problems), part
    assert len(problems) == 4


def test_error_says_them_all() -> None:
    error = TrainingSetupError(["one.", "two."])
    assert str(error) == "training cannot begin:\n- one.\n- two."


@pytest.mark.parametrize("rate", [0.0, -0.1, math.nan, math.inf])
def test_rate_that_cannot_train_is_a_problem(rate: float) -> None:
    trainer = trainer_of(config(), nn.Linear(4, 1))
    trainer.optimizer.param_groups[0]["lr"] = rate
    (problem,) = problems_of(trainer)
    assert problem == (
        f"the learning rate of group 0 is {rate:g}; it must be above 0. Give the optimizer another "
        "lr, or a scheduler that raises it."
    )


def test_rate_may_begin_at_zero_where_a_scheduler_raises_it() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    with AMPTrainer(config(), model, optimizer, mse, scheduler) as trainer:
        assert trainer.training_step(batches(1)[0]) is not None


def test_frozen_model_is_a_problem() -> None:
    model = nn.Linear(4, 1).requires_grad_(False)
    (problem,) = problems_of(trainer_of(config(), model))
    assert "no parameter of the model requires a gradient" in problem


def test_optimizer_that_needs_a_closure_is_a_problem() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    (problem,) = problems_of(AMPTrainer(config(), model, optimizer, mse))
    assert problem.startswith("LBFGS calls a closure")


def test_bad_state_of_the_optimizer_is_a_problem() -> None:
    model = nn.Linear(4, 1)
    with trainer_of(config(), model) as trainer:
        all_steps(trainer, batches(1))
        optimizer = trainer.optimizer
    optimizer.state[model.weight]["exp_avg"].fill_(math.nan)
    (problem,) = problems_of(AMPTrainer(config(), model, optimizer, mse))
    assert "exp_avg, which is in the optimizer, holds NaN" in problem


def test_many_bad_tensors_are_counted() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)], nn.Linear(4, 1))
    for parameter in model.parameters():
        nn.init.constant_(parameter, math.nan)
    problems = problems_of(trainer_of(config(), model))
    assert len(problems) == 6
    assert problems[-1].startswith("... and 9 more tensors")


def test_nothing_was_changed_when_training_cannot_begin() -> None:
    model = small_model()
    trainer = trainer_of(config(), model)
    trainer.optimizer.param_groups[0]["lr"] = math.nan
    before, state = raw(model), torch.get_rng_state()
    problems_of(trainer)
    assert raw(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert trainer.step == 0


def masked(output: Tensor, target: Tensor) -> Tensor:
    """A NaN target is one that is not known."""
    known = target.isfinite()
    return mse(output[known], target[known])


def test_targets_that_are_nan_on_purpose_are_no_problem() -> None:
    plain, ours = small_model(), small_model()
    x, y = batches(1)[0]
    y[0] = math.nan
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.05)
    torch.manual_seed(7)
    masked(plain(x), y).backward()
    optimizer.step()
    torch.manual_seed(7)
    with trainer_of(config(), ours, loss_fn=masked) as trainer:
        assert trainer.training_step((x, y)) is not None
    assert raw(ours) == raw(plain)  # that the loss was tried leaves no trace


def test_buffer_that_holds_inf_on_purpose_is_no_problem() -> None:
    model = nn.Linear(4, 1)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    with trainer_of(config(), model) as trainer:
        assert trainer.training_step(batches(1)[0]) is not None


def test_poisoned_running_statistics_are_a_problem() -> None:
    model = small_model()
    model[1].running_var.fill_(math.inf)
    (problem,) = problems_of(trainer_of(config(), model))
    assert problem.startswith("buffers.1.running_var")


def test_what_is_only_odd_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model().eval()
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)
    with (
        caplog.at_level(logging.WARNING, "stayfinite"),
        AMPTrainer(config(), model, optimizer, mse) as trainer,
    ):
        all_steps(trainer, batches(2))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("the model is in eval mode")
    assert said[1].startswith("4 trainable parameters are not in the optimizer: 0.weight")
