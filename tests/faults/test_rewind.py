"""A bad batch is left out as if it had never been delivered: all state equal, by the bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from trainings import Combination, Training

import stayfinite
from stayfinite.recover.config import RecoveryConfig

BATCHES, BAD = 12, 5
CONFIG = RecoveryConfig(primary_strategy="skip", snapshot_every=4)
OPTIMIZERS = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
]  # fmt: skip


def combinations() -> list[Combination]:
    models = itertools.cycle(["dropout", "batchnorm", "embedding"])
    schedulers = itertools.cycle(["none", "step", "cosine", "onecycle", "sequential"])
    precisions = itertools.cycle(["fp32", "bf16", "fp16", "fp32"])
    averaged = itertools.cycle([False, True, False])
    made = [
        Combination(
            model=next(models),
            optimizer=optimizer,
            scheduler=next(schedulers),
            precision=next(precisions),
            accumulate=accumulate,
            ema=next(averaged),
        )
        for accumulate in (1, 4)
        for optimizer in OPTIMIZERS * 2
        if next(models)  # so that an optimizer meets another model the second time
    ]
    special = [
        Combination(optimizer="LBFGS", options={"max_iter": 3}),
        Combination(optimizer="LBFGS", model="batchnorm", scheduler="step", ema=True),
        Combination(optimizer="Muon", model="matrices", scheduler="cosine"),
        Combination(optimizer="Muon", model="matrices", accumulate=4, precision="bf16"),
        Combination(optimizer="SparseAdam", model="sparse", scheduler="step"),
        Combination(optimizer="SparseAdam", model="sparse", accumulate=4),
        Combination(optimizer="Adam", options={"fused": True}, model="batchnorm"),
        Combination(optimizer="SGD", options={"fused": True, "momentum": 0.9}, precision="fp16"),
        Combination(optimizer="AdamW", options={"amsgrad": True, "foreach": True}, ema=True),
    ]
    busy = [
        Combination(model=model, optimizer=optimizer, workers=2, accumulate=accumulate)
        for model, optimizer, accumulate in [("dropout", "AdamW", 1), ("batchnorm", "SGD", 4)]
    ]
    return made + special + busy


COMBINATIONS = combinations()


@pytest.fixture(autouse=True, scope="module")
def torch_is_complete() -> None:
    """torch loads more of itself in a first step, and that draws from python's generator."""
    training = Training(Combination())
    training.step(next(training.batches(1)))


def test_there_are_enough_combinations() -> None:
    assert len({str(each) for each in COMBINATIONS}) >= 50


def window(number: int, accumulate: int) -> int:
    return number // accumulate


def without_the_bad_window(combination: Combination) -> dict[str, Any]:
    training = Training(combination)
    for batch in training.batches(BATCHES, bad=BAD):
        if window(batch[0], combination.accumulate) != window(BAD, combination.accumulate):
            training.step(batch)
    return training.state()


def guard_over(training: Training, config: RecoveryConfig = CONFIG) -> stayfinite.Guard:
    return stayfinite.watch(
        training.model,
        training.optimizer,
        scaler=training.scaler,
        scheduler=training.scheduler,
        ema=training.ema,
        config=config,
        sinks=[],
    )


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_skipping_a_batch_equals_never_having_had_it(combination: Combination) -> None:
    expected = without_the_bad_window(combination)
    training = Training(combination)
    with guard_over(training) as guard:
        for batch in training.batches(BATCHES, bad=BAD):
            guard.step(training.step, batch)
    assert len(guard.incidents) == 1
    actual = training.state()
    assert [part for part in expected if actual[part] != expected[part]] == []


@pytest.mark.parametrize("combination", COMBINATIONS[::4], ids=str)
def test_skipping_in_a_loop_that_knows_nothing_of_us(combination: Combination) -> None:
    expected = without_the_bad_window(combination)
    training = Training(combination)
    with guard_over(training) as guard:
        for batch in training.batches(BATCHES, bad=BAD):
            training.step(batch)
    assert len(guard.incidents) == 1
    actual = training.state()
    assert [part for part in expected if actual[part] != expected[part]] == []


@pytest.mark.parametrize("combination", COMBINATIONS[1::5], ids=str)
def test_healthy_training_is_the_same_with_and_without(combination: Combination) -> None:
    plain, watched = Training(combination), None
    for batch in plain.batches(BATCHES):
        plain.step(batch)
    expected = plain.state()
    watched = Training(combination)
    with guard_over(watched) as guard:
        for batch in watched.batches(BATCHES):
            guard.step(watched.step, batch)
    assert guard.incidents == []
    assert watched.state() == expected


def test_the_state_is_never_bad_in_between() -> None:
    training = Training(Combination(model="batchnorm", optimizer="SGD"))
    with guard_over(training) as guard:
        for batch in training.batches(BATCHES, bad=BAD):
            result = guard.step(training.step, batch)
            assert (result is None) == (batch[0] == BAD)
            assert all(torch.isfinite(t).all() for t in training.model.state_dict().values())
