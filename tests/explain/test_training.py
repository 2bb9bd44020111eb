"""Causes that only a run shows: its history, its optimizer, what it loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import Net, cause, found
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from stayfinite.explain.clue import Context
from stayfinite.explain.rules import diagnose
from stayfinite.guard.evidence import impossible_moments
from stayfinite.records import Origin, TensorSummary


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    x: Tensor,
    *,
    steps: int = 200,
    loss: Callable[[Tensor], Tensor] = lambda output: output.square().mean(),
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(x))
        value.backward()
        optimizer.step()
        if not torch.isfinite(value):
            return


def test_rate_that_is_too_high() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    assert cause(lambda: fit(net, SGD(net.parameters(), lr=5.0), torch.randn(8, 3))) == (
        "lr_too_high"
    )


def test_weights_of_torch_func_that_ran_away_are_no_batch() -> None:
    known = {"shape": (4,), "dtype": "float32", "device": "cpu", "numel": 4}
    origin = Origin(
        phase="forward",
        op="aten.mul.Tensor",
        inputs=(TensorSummary(name="self", min=-1e25, max=3e25, **known),),
        outputs=(TensorSummary(name="output", pos_inf_count=1, **known),),
        facts={"data": ["self"], "made_by": {"self": ["index"]}, "expression": "p * q"},
        exact=True,
    )
    assert diagnose(origin, Context(step=11)).cause == "lr_too_high"
    said = diagnose(origin, Context(step=0))
    assert said.cause == "bad_input_data"
    assert "usually" not in said.why


def test_rate_that_a_decay_raised() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    optimizer, x = SGD(net.parameters(), lr=0.05), torch.randn(8, 3)

    def step() -> None:
        fit(net, optimizer, x, steps=20)
        optimizer.param_groups[0]["lr"] *= 100
        fit(net, optimizer, x)

    assert cause(step) == "bad_lr_schedule"


def ramp(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1.2 ** (step - 20))


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=9.0, total_steps=200)


@pytest.mark.parametrize(
    ("schedule", "expected"), [(ramp, "bad_lr_schedule"), (one_cycle, "lr_too_high")]
)
def test_rate_that_goes_past_its_base(
    schedule: Callable[[Optimizer], LRScheduler], expected: str
) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    optimizer, x = SGD(net.parameters(), lr=0.1), torch.randn(8, 3)
    scheduler = schedule(optimizer)

    def step() -> None:
        for _ in range(150):
            fit(net, optimizer, x, steps=1)
            scheduler.step()

    assert cause(step) == expected


def test_inputs_in_their_natural_units() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    x = torch.rand(8, 3) * 5000
    assert cause(lambda: fit(net, SGD(net.parameters(), lr=0.01), x)) == "unnormalized_input"


def test_one_batch_far_out_of_range() -> None:
    net = nn.Linear(3, 1)
    optimizer = SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        for i in range(6):
            fit(net, optimizer, torch.ones(2, 3) * (1e25 if i == 5 else 1.0), steps=1)

    assert cause(step) == "bad_input_data"


def test_weights_that_start_far_too_large() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(30)])
    for layer in net:
        nn.init.normal_(layer.weight, std=20.0)
    assert cause(lambda: fit(net, SGD(net.parameters(), lr=1e-3), torch.randn(4, 64), steps=2)) == (
        "bad_init"
    )


def deep(std: float) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(60)])
    for layer in net:
        nn.init.normal_(layer.weight, std=std)
    return net


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_overflow_before_any_update_is_no_matter_of_the_rate(with_optimizer: bool) -> None:
    net, x = deep(std=1.0), torch.randn(4, 64)
    optimizer = SGD(net.parameters(), lr=10.0)
    incident = found(lambda: fit(net, optimizer, x, steps=1) if with_optimizer else net(x))[0]
    assert (incident.diagnosis.cause, incident.diagnosis.confidence) == ("bad_init", "likely")
    assert "64 inputs" in incident.diagnosis.why


def test_product_of_plain_tensors_is_no_matter_of_the_rate() -> None:
    torch.manual_seed(0)

    def forward() -> Tensor:
        x = torch.randn(4, 128)
        for _ in range(50):
            x = torch.relu(x @ torch.randn(128, 128))
        return x

    assert cause(forward) == "bad_init"


def test_sum_that_nobody_trains_is_not_blamed_on_weights() -> None:
    def grow() -> Tensor:
        x = torch.ones(1)
        for _ in range(200):
            x = x * 2
        return x

    assert cause(grow) == "unknown"


def test_update_by_hand_at_too_high_a_rate() -> None:
    weight = torch.ones(3, requires_grad=True)

    def train() -> Tensor:
        for _ in range(60):
            (50 * weight**2).sum().backward()
            with torch.no_grad():
                weight.sub_(0.1 * weight.grad)
            weight.grad = None
        return weight

    assert cause(train) == "lr_too_high"


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 1.9)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(200):
            x = x @ self.weight
        return x


def test_loop_that_grows_on_its_own_result() -> None:
    net = Loop()
    assert cause(lambda: fit(net, SGD(net.parameters(), lr=1e-3), torch.ones(1, 4), steps=1)) == (
        "exploding_recurrence"
    )


def test_state_that_grows_without_a_weight_is_not_told_to_initialise_one() -> None:
    def grow() -> Tensor:
        x = torch.full((4,), 0.5, requires_grad=True)
        for _ in range(20):
            x = x + 0.5 * x * x
        return x.sum()

    diagnosis = found(grow)[0].diagnosis
    assert diagnosis.cause == "exploding_recurrence"
    assert "weight" not in diagnosis.fix
    assert "Bound what the loop carries" in diagnosis.fix


def test_lbfgs_without_a_line_search() -> None:
    x = torch.tensor([-1.2, 1.0], requires_grad=True)
    optimizer = LBFGS([x], max_iter=100)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (torch.exp(x) - 1).pow(2).sum()
        loss.backward()
        return loss

    assert cause(lambda: optimizer.step(closure)) == "lbfgs_no_line_search"


def test_eps_of_adam_in_half_precision() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = Adam([weight])

    def step() -> None:
        weight.grad = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float16)
        optimizer.step()

    assert cause(step) == "optimizer_eps"


@pytest.mark.parametrize("is_loaded", [True, False])
def test_moments_that_half_precision_made_zero(is_loaded: bool) -> None:
    weight = nn.Parameter(torch.zeros(3))
    first = Adam([weight], lr=0.01)

    def update(optimizer: Optimizer, *gradient: float) -> None:
        weight.grad = torch.tensor(gradient)
        optimizer.step()

    def step() -> Tensor:
        optimizer = first
        if is_loaded:
            optimizer = Adam([weight], lr=0.01)
            optimizer.load_state_dict(first.state_dict())
        else:
            update(optimizer, 1e-4, 1e-4, 0.1)
        second = optimizer.state[weight]["exp_avg_sq"]
        second.copy_(second.half())
        update(optimizer, 0.0, 0.0, 0.0)
        update(optimizer, 0.0, 0.0, 0.0)
        loss = (10 * weight.abs()).exp().sum()
        loss.backward()
        return loss

    if is_loaded:
        for _ in range(5):
            update(first, 1e-4, 1e-4, 0.1)
    incident = found(step)[0]
    assert incident.diagnosis is not None
    assert incident.diagnosis.cause == ("checkpoint_precision_loss" if is_loaded else "unknown")
    assert "2 of 3 elements" in incident.diagnosis.why


@settings(max_examples=60)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32) | st.just(0.0), min_size=1, max_size=30),
    st.sampled_from([(0.9, 0.999), (0.95, 0.98), (0.5, 0.9), (0.0, 0.99)]),
)
def test_moments_that_gradients_leave_are_possible(
    gradients: list[float], betas: tuple[float, float]
) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Adam([weight], betas=betas, eps=0.0 if 0.0 not in gradients else 1e-30)
    for value in gradients:
        weight.grad = torch.tensor([value])
        optimizer.step()
    assert impossible_moments(optimizer, len(gradients)) is None


def test_eps_of_zero() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = RMSprop([weight], eps=0.0)

    def step() -> None:
        (weight * torch.tensor([1.0, 0.0, 1.0])).sum().backward()
        optimizer.step()

    assert cause(step) == "division_by_zero_optimizer"


class Normalised(Optimizer):
    """Written by hand, and without an eps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad / param.grad.abs())


def test_hand_written_optimizer_that_divides_by_zero() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Normalised([weight], {"lr": 0.1})

    def step() -> None:
        (weight * torch.tensor([1.0, 0.0, 1.0])).sum().backward()
        optimizer.step()

    assert cause(step) == "division_by_zero_optimizer"


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_rate_that_the_schedule_got_wrong(rate: float) -> None:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)

    def step() -> None:
        for i in range(3):
            optimizer.param_groups[0]["lr"] = rate if i == 1 else 0.1
            fit(net, optimizer, torch.ones(2, 3), steps=1)

    assert cause(step) == "bad_lr_schedule"


def test_state_that_was_bad_in_the_file(tmp_path: Path) -> None:
    state = Net().state_dict()
    state["first.weight"].fill_(math.nan)
    torch.save(state, tmp_path / "last.pt")
    net = Net()

    def step() -> None:
        net.load_state_dict(torch.load(tmp_path / "last.pt", weights_only=True))
        fit(net, SGD(net.parameters(), lr=0.1), torch.ones(2, 3), steps=1)

    assert cause(step) == "checkpoint_corrupt"


def test_state_that_was_narrowed_on_the_way() -> None:
    net, large = Net(), Net()
    large.first.weight.data.fill_(1e6)

    def step() -> None:
        narrow = {name: value.half() for name, value in large.state_dict().items()}
        net.load_state_dict(narrow)
        fit(net, SGD(net.parameters(), lr=0.1), torch.ones(2, 3), steps=1)

    assert cause(step) == "checkpoint_precision_loss"


def test_memory_that_nobody_filled() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert cause(uninitialised) == "uninitialized_memory"
    finally:
        torch.use_deterministic_algorithms(False)


def uninitialised() -> None:
    centers = nn.Parameter(torch.empty(3, 2))
    (torch.ones(1, 3) @ centers).sum().backward()


def test_buffer_of_numpy_that_was_bad_when_it_was_made() -> None:
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weights = np.arange(12, dtype=np.float32).reshape(3, 4) * [0, 1, 1, 1]
            with np.errstate(invalid="ignore"):
                self.register_buffer("bank", torch.from_numpy(weights / weights.sum(0)).float())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.bank

    def step() -> Tensor:
        net, bank = nn.Linear(2, 3), Bank()
        loss = bank(net(torch.ones(4, 2))).sum()
        loss.backward()
        return loss

    assert cause(step) == "bad_buffer"


def test_running_statistics_that_took_a_bad_value() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        for i in range(2):
            x = torch.ones(4, 2) * (1e6 if i == 0 else 1.0)
            scaler.scale(net(x.half().float()).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        net.eval()
        net(torch.ones(1, 2)).sum().backward()

    assert cause(step) == "bn_stats_poisoned"


def test_network_that_learns_from_its_own_targets() -> None:
    torch.manual_seed(0)
    value, target = nn.Linear(4, 1), nn.Linear(4, 1)
    target.load_state_dict(value.state_dict())
    optimizer = SGD(value.parameters(), lr=0.05)

    def step() -> None:
        for _ in range(400):
            state = torch.randn(8, 4) + 1
            with torch.no_grad():
                goal = 1.0 + 5.0 * target(state + 1)
            loss = (value(state) - goal).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            target.load_state_dict(value.state_dict())
            if not torch.isfinite(loss):
                return

    assert cause(step) == "rl_value_divergence"


def test_two_networks_that_push_each_other_away() -> None:
    torch.manual_seed(0)
    make, judge = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = SGD(make.parameters(), lr=0.02), SGD(judge.parameters(), lr=0.02)

    def step() -> None:
        for _ in range(200):
            noise = torch.randn(8, 2)
            second.zero_grad()
            loss = judge(make(noise).detach()).mean() - judge(torch.ones(8, 2)).square().mean()
            loss.backward()
            second.step()
            first.zero_grad()
            fake = -judge(make(noise)).square().mean()
            fake.backward()
            first.step()
            if not torch.isfinite(fake):
                return

    assert cause(step) == "gan_divergence"


def test_value_without_a_cause_is_unknown_with_its_inputs() -> None:
    incident = found(lambda: torch.special.ndtri(torch.zeros(2)))[0]
    assert incident.diagnosis.cause == "unknown"
    assert incident.diagnosis.confidence == "possible"
    assert "torch.special.ndtri(torch.zeros(2))" in incident.diagnosis.why
    assert incident.diagnosis.evidence[0].startswith("self: float32 [2]")


def test_fix_names_the_users_own_expression() -> None:
    probs = torch.zeros(2)
    diagnosis = found(lambda: torch.log(probs * 2))[0].diagnosis
    assert "torch.log((probs * 2)" in diagnosis.fix or "probs * 2" in diagnosis.fix
    assert "`torch.log(probs * 2)`" in diagnosis.why
