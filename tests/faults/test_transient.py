"""A transient fault, undone and tried again, leaves no trace: all state equal, by the bytes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from as_before import torch_as_before as torch_as_before
from jobs import Combination, Training

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
        Combination(optimizer="LBFGS", model="batchnorm", scheduler="step", ema=True),
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
    """Every combination with some of the faults, so that each meets many of the others."""
    faults = itertools.cycle(FAULTS)
    made = []
    for combination in combinations():
        for fault in itertools.islice(faults, 2):
            # A GradScaler takes a bad gradient for its own overflow, and skips by itself.
            is_absorbed = combination.precision == "fp16" and fault in ("node", "gradient")
            chosen = "module" if is_absorbed else fault
            made.append(pytest.param(combination, chosen, id=f"{chosen}-{combination}"))
        next(faults)
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
    training: Training, config: RecoveryConfig = RETRY, **options: Any
) -> tuple[stayfinite.Guard, Fault, list[float | None]]:
    """Train with a guard and a fault; the results of the steps too."""
    at_step = step_of_the_fault(training.combination)
    with (
        inject(training.model, training.optimizer, at_step=at_step, **options) as fault,
        guard_over(training, config) as guard,
    ):
        results = [guard.step(training.step, batch) for batch in training.batches(BATCHES)]
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
