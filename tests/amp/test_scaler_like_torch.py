"""Without a floor, and where gradients stay as they were unscaled: torch's scaler, bit for bit."""

from __future__ import annotations

import copy
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling import Training
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, Optimizer

from stayfinite.amp.scaler import LARGEST_SCALE, SMALLEST_SCALE, DynamicLossScaler

sys.path.insert(0, str(Path(__file__).parents[1] / "detect"))  # for optimizer_variants

from optimizer_variants import Parameters, image, variants

# A GradScaler takes no closures, so no LBFGS.
amp_variants = pytest.mark.parametrize(
    ("cls", "options"), [v for v in variants() if v.values[0] is not torch.optim.LBFGS]
)
without_floor = {"min_scale": SMALLEST_SCALE, "max_scale": LARGEST_SCALE, "floor_patience": 10**9}


class Side:
    """One of two trainings that must stay equal: a scaler and two optimizers."""

    def __init__(self, scaler: GradScaler, cls: type[Optimizer], options: dict[str, Any]) -> None:
        self.scaler = scaler
        self.params = [Parameters(cls), Parameters(cls)]
        self.optimizers = [cls(p.all, **{"lr": 0.1, **options}) for p in self.params]
        self.numbers = torch.Generator().manual_seed(0)

    def step(self, dice: random.Random, *, may_overflow: bool) -> None:
        scale = float(self.scaler.scale(torch.ones(())))
        for params, optimizer in zip(self.params, self.optimizers, strict=True):
            for _ in range(dice.choice((1, 1, 3))):  # accumulation
                self.accumulate(params, scale, bad=may_overflow and dice.random() < 0.3)
            if dice.random() < 0.5:
                self.scaler.unscale_(optimizer)
                if not params.sparse and dice.random() < 0.5:
                    clip_grad_norm_(params.used, 0.5)
            self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=dice.random() < 0.5)
        self.scaler.update()

    def accumulate(self, params: Parameters, scale: float, *, bad: bool) -> None:
        for param in params.used:
            grad = torch.randn(param.shape, generator=self.numbers) * scale
            grad.view(-1)[-1] = math.inf if bad else 1.0
            if params.sparse:
                param.grad = grad.to_sparse()
            else:
                param.grad = grad if param.grad is None else param.grad + grad

    def counts(self) -> tuple[float, int]:
        state = self.scaler.state_dict()
        return state["scale"], state["_growth_tracker"]

    def image(self) -> Any:
        return [image(optimizer) for optimizer in self.optimizers]


def compare(ours: Side, theirs: Side, *, seed: int, steps: int) -> None:
    dice = random.Random(seed), random.Random(seed)
    for number in range(steps):
        for side, own in zip((ours, theirs), dice, strict=True):
            # torch itself goes wrong when a fused optimizer's first step overflows.
            side.step(own, may_overflow=number > 0)
        assert ours.counts() == theirs.counts()
        assert number % 6 or ours.image() == theirs.image()


@amp_variants
@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.7, 0.3)])
def test_every_optimizer_ends_as_under_torchs_scaler(
    cls: type[Optimizer], options: dict[str, Any], factors: tuple[float, float]
) -> None:
    grow, back = factors
    chosen = {"growth_factor": grow, "backoff_factor": back, "growth_interval": 3}
    ours = Side(DynamicLossScaler("cpu", **without_floor, **chosen), cls, options)
    theirs = Side(GradScaler("cpu", **chosen), cls, options)
    compare(ours, theirs, seed=0, steps=25)


@settings(deadline=None, derandomize=True)
@given(
    st.sampled_from([(SGD, {"momentum": 0.9}), (Adam, {}), (Adam, {"fused": True})]),
    st.integers(-100, 100),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_any_trace_ends_as_under_torchs_scaler(
    kind: tuple[type[Optimizer], dict[str, Any]], exponent: int, interval: int, seed: int
) -> None:
    chosen = {"init_scale": 2.0**exponent, "growth_interval": interval}
    ours = Side(DynamicLossScaler("cpu", **without_floor, **chosen), *kind)
    theirs = Side(GradScaler("cpu", **chosen), *kind)
    compare(ours, theirs, seed=seed, steps=7)


class Model(nn.Module):
    """An embedding with sparse gradients, a norm, and a layer that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8, sparse=True)
        self.norm = nn.BatchNorm1d(8)
        self.layer = nn.Linear(8, 4)
        self.unused = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.norm(self.words(x))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_training_ends_as_under_torchs_scaler(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Model()
    ends = []
    skipped = []
    for scaler in (DynamicLossScaler("cpu", **without_floor, **fast), GradScaler("cpu", **fast)):
        ends.append(trained(copy.deepcopy(model), scaler, dtype, skipped))
    assert ends[0] == ends[1]
    assert dtype is torch.bfloat16 or any(skipped)


fast = {"init_scale": 2.0**22, "growth_interval": 4}


def trained(model: Model, scaler: GradScaler, dtype: torch.dtype, skipped: list[bool]) -> Any:
    torch.manual_seed(1)
    sparse = torch.optim.SparseAdam(list(model.words.parameters()), lr=0.1)
    dense = Adam([p for n, p in model.named_parameters() if not n.startswith("words")], lr=0.1)
    for _ in range(30):
        words, targets = torch.randint(10, (16,)), torch.randint(4, (16,))
        with torch.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(model(words), targets)
        sparse.zero_grad()
        dense.zero_grad()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(sparse)
        scaler.step(dense)
        scaler.update()
        skipped.append(scaler.get_scale() < before)
    return [image(dict(model.state_dict())), image(sparse), image(dense), scaler.get_scale()]


def test_a_thousand_overflows_in_a_row_do_not_hurt_the_weights() -> None:
    ours = Training(DynamicLossScaler("cpu"))
    for _ in range(1000):
        ours.step("inf")
    assert ours.weight.tolist() == [1.0] * 3
    assert ours.scaler.get_scale() == ours.scaler.min_scale
    ours.step("good")
    assert ours.weight.tolist() == [1.0 - 2.0**-6] * 3

    theirs = Training(GradScaler("cpu"))
    for _ in range(166):
        theirs.step("inf")
    assert theirs.scaler.get_scale() == 0.0
    theirs.step("good")
    assert theirs.weight.isnan().all()


def test_fused_first_step_that_overflows_leaves_no_uninitialised_momentum() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = SGD([weight], lr=0.1, momentum=0.9, fused=True)
    training = Training(DynamicLossScaler("cpu"), optimizer)
    training.step("inf")
    assert not optimizer.state  # torch's scaler leaves a buffer that was never written
    training.step("good")
    assert weight.tolist() == pytest.approx([0.9] * 3)
