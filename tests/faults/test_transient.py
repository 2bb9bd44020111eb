"""A transient fault, undone and tried again, leaves no trace: all state equal, by the bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from as_before import torch_as_before as torch_as_before
from trainings import Combination, Training

import stayfinite
from stayfinite.recover.config import RecoveryConfig
from stayfinite.testing import Fault, inject

BATCHES = 12
RETRY = RecoveryConfig(primary_strategy="skip", skip_batch_after_nan=False, snapshot_every=4)
OPTIMIZERS = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
]  # fmt: skip
FIRST_LAYER = {"embedding": "table", "sparse": "table"}
FAULTS = ("loss", "module", "inputs", "op", "node", "gradient")


def combinations() -> list[Combination]:
    models = itertools.cycle(["dropout", "batchnorm", "embedding"])
    precisions = itertools.cycle(["fp16", "fp32", "bf16", "fp16"])
    schedulers = itertools.cycle(["step", "none", "cosine", "sequential"])
    made = [
        Combination(
            model=next(models),
            optimizer=optimizer,
            scheduler=next(schedulers),
            precision=next(precisions),
            accumulate=accumulate,
            ema=optimizer in ("Adam", "SGD"),
        )
        for accumulate in (1, 4)
        for optimizer in OPTIMIZERS
        if accumulate == 1 or next(models)  # so that an optimizer meets another model
    ]
    special = [
        Combination(optimizer="LBFGS", options={"max_iter": 3}),
        Combination(
            optimizer="LBFGS",
            options={"max_iter": 2},
            model="batchnorm",
            scheduler="step",
            ema=True,
        ),
        Combination(optimizer="Muon", model="matrices", scheduler="cosine"),
        Combination(optimizer="SparseAdam", model="sparse", scheduler="step"),
        Combination(optimizer="Adam", options={"fused": True}, model="batchnorm"),
        Combination(optimizer="SGD", options={"fused": True, "momentum": 0.9}, precision="fp16"),
        Combination(optimizer="AdamW", options={"amsgrad": True, "foreach": True}, accumulate=4),
        Combination(optimizer="SGD", options={"momentum": 0.9}, model="batchnorm", workers=2),
        Combination(optimizer="AdamW", scheduler="onecycle", precision="fp16", accumulate=4),
    ]
    return made + special


def cases() -> list[Any]:
    """Every combination with one of the faults; an optimizer meets another one the second time."""
    faults = itertools.cycle([*FAULTS, FAULTS[0]])
    made = []
    for combination, fault in zip(combinations(), faults, strict=False):
        # A GradScaler takes a bad gradient for its own overflow, and skips by itself.
        is_absorbed = combination.precision == "fp16" and fault in ("node", "gradient")
        chosen = "module" if is_absorbed else fault
        made.append(pytest.param(combination, chosen, id=f"{chosen}-{combination}"))
    return made


def target(kind: str, training: Training) -> dict[str, Any]:
    name = training.combination.model
    if kind == "module":
        return {"module": FIRST_LAYER.get(name, "layers.0")}
    if kind == "gradient":
        return {"gradient": next(name for name, _ in training.model.named_parameters())}
    return {
        "loss": {"loss": True},
        "inputs": {"inputs": True},
        "op": {"op": "nll_loss"},
        "node": {"node": "LogSoftmaxBackward0"},
    }[kind]


def step_of_the_fault(combination: Combination) -> int:
    return 1 if combination.accumulate > 1 else 5


def without_a_fault(combination: Combination) -> dict[str, Any]:
    training = Training(combination)
    for batch in training.batches(BATCHES):
        training.step(batch)
    return training.state()


def guard_over(training: Training, config: RecoveryConfig) -> stayfinite.Guard:
    return stayfinite.watch(
        training.model,
        training.optimizer,
        scaler=training.scaler,
        scheduler=training.scheduler,
        ema=training.ema,
        config=config,
        sinks=[],
    )


def differences(training: Training, expected: dict[str, Any]) -> list[str]:
    actual = training.state()
    return [part for part in expected if actual[part] != expected[part]]


def train(
    training: Training, config: RecoveryConfig = RETRY, *, count: int = BATCHES, **options: Any
) -> tuple[stayfinite.Guard, Fault, list[float | None]]:
    """Train with a guard and a fault; the results of the steps too."""
    options.setdefault("at_step", step_of_the_fault(training.combination))
    with (
        inject(training.model, training.optimizer, **options) as fault,
        guard_over(training, config) as guard,
    ):
        results = [guard.step(training.step, batch) for batch in training.batches(count)]
    return guard, fault, results


@pytest.mark.parametrize(("combination", "kind"), cases())
def test_retrying_after_a_transient_fault_equals_a_run_without_it(
    combination: Combination, kind: str
) -> None:
    expected = without_a_fault(combination)
    training = Training(combination)
    guard, fault, results = train(training, **target(kind, training))
    assert len(fault.hits) == 1
    assert differences(training, expected) == []
    (incident,) = guard.incidents
    assert incident.step == step_of_the_fault(combination)
    assert incident.diagnosis.cause == "transient_fault"
    assert None not in results


SOME = combinations()[::5]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("at_step", [0, BATCHES - 1])
def test_the_first_and_the_last_step_can_be_retried(at_step: int, value: str) -> None:
    combination = Combination(optimizer="Adam", scheduler="step", ema=True)
    expected = without_a_fault(combination)
    training = Training(combination)
    guard, _, _ = train(training, at_step=at_step, loss=True, value=value)
    assert [incident.step for incident in guard.incidents] == [at_step]
    assert differences(training, expected) == []


# torch's remark when a scaler skips the very first step.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("combination", SOME, ids=str)
def test_a_fault_in_every_window_leaves_no_trace(combination: Combination) -> None:
    expected = without_a_fault(combination)
    training = Training(combination)
    each_window = itertools.groupby(
        training.batches(BATCHES), lambda batch: batch[0] // combination.accumulate
    )
    with guard_over(training, RETRY) as guard:
        for number, batches in each_window:
            options = target(("loss", "inputs", "module")[number % 3], training)
            with inject(training.model, training.optimizer, **options):
                for batch in batches:
                    guard.step(training.step, batch)
    assert len(guard.incidents) == BATCHES // combination.accumulate
    assert differences(training, expected) == []


@pytest.mark.parametrize("combination", SOME, ids=str)
def test_a_fault_that_stays_costs_one_window(combination: Combination) -> None:
    """Tried again in vain, the batches are skipped, as if they had never been."""
    training = Training(combination)
    window = step_of_the_fault(combination)
    for batch in training.batches(BATCHES):
        if batch[0] // combination.accumulate != window:
            training.step(batch)
    expected = training.state()
    training = Training(combination)
    guard, fault, results = train(training, persistent=True, **target("module", training))
    assert len(fault.hits) == 4  # noticed, replayed; tried again, replayed
    assert len(guard.incidents) == 2
    assert results.count(None) == 1
    assert differences(training, expected) == []


def test_the_operator_of_a_fault_that_stays_is_found() -> None:
    training = Training(Combination(optimizer="Adam"))
    guard, _, _ = train(training, persistent=True, op="nll_loss")
    assert [incident.origin.op for incident in guard.incidents] == [
        "aten.nll_loss_forward.default"
    ] * 2
    assert all(incident.diagnosis.cause != "transient_fault" for incident in guard.incidents)


def test_a_bad_parameter_is_brought_back_from_a_snapshot() -> None:
    combination = Combination(optimizer="Adam", scheduler="step", ema=True)
    expected = without_a_fault(combination)
    training = Training(combination)
    config = RecoveryConfig(primary_strategy="reset", skip_batch_after_nan=False, snapshot_every=1)
    guard, fault, _ = train(training, config, parameter="layers.0.weight")
    assert len(fault.hits) == 1
    assert [incident.outcome.strategy for incident in guard.incidents] == ["reset"]
    assert differences(training, expected) == []


@pytest.mark.parametrize("option", ["parameter", "state"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_bad_state_of_training_does_not_stay(option: str, accumulate: int) -> None:
    training = Training(Combination(optimizer="Adam", accumulate=accumulate))
    config = RecoveryConfig(primary_strategy="reset", fallback_strategy="reset")
    names = {"parameter": "layers.0.weight", "state": "layers.0.weight.exp_avg"}
    guard, fault, results = train(training, config, count=24, **{option: names[option]})
    assert fault.fired
    assert [incident.outcome.strategy for incident in guard.incidents] == ["reset"]
    assert all(p.isfinite().all() for p in training.model.parameters())
    state = training.optimizer.state_dict()["state"]
    assert all(kept["exp_avg"].isfinite().all() for kept in state.values())
    assert results[-1] is not None


def test_a_bad_gradient_under_a_scaler_is_left_to_the_scaler() -> None:
    training = Training(Combination(optimizer="Adam", precision="fp16"))
    guard, fault, _ = train(training, gradient="layers.0.weight")
    assert fault.fired
    assert guard.incidents == []
    assert guard.scaler_skips == 1
    assert all(p.isfinite().all() for p in training.model.parameters())
