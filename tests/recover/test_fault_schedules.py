"""Any schedule of faults ends recovered or in a clean stop, within budget, weights finite.

Promise: 10,000 of them (the profile "prove"); here as many as the profile says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import INF, NAN, report
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, Optimizer

from stayfinite.amp.scaler import DynamicLossScaler
from stayfinite.detect.finite import all_finite
from stayfinite.nested import named_states, named_weights
from stayfinite.recover.actions import Situation
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy, Rung
from stayfinite.recover.float32 import is_raised
from stayfinite.recover.manager import NaNRecoveryManager
from stayfinite.snapshot import SnapshotRing, TrainingState
from stayfinite.training import gradients_of

Kind = Literal[
    "loss", "element", "all gradients", "scale", "rate", "precision", "weight", "momentum"
]
SNAPSHOT_EVERY = 4


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a batch; some faults end once their reason is gone."""

    kind: Kind
    value: float
    is_transient: bool  # only the first time that the batch comes


@dataclass
class Bench:
    """A real small job with a loader that can be wound back, driven through a schedule."""

    config: RecoveryConfig
    schedule: list[Fault | None]
    optimizer_kind: type[Optimizer]
    scaler: GradScaler | None
    dtype: torch.dtype
    unscales: bool

    def __post_init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(self.dtype)
        self.optimizer = self.optimizer_kind(self.model.parameters(), lr=0.01)
        self.manager = NaNRecoveryManager(self.config)
        self.ring = SnapshotRing(
            TrainingState(self.model, self.optimizer, scaler=self.scaler),
            slots=self.config.snapshot_slots,
        )
        self.position = self.attempts = 0
        self.seen: set[int] = set()

    def run(self) -> bool:
        """True when all batches were gone through, False when the manager stopped the run."""
        most = (len(self.schedule) + 1) ** 2 * (self.config.max_consecutive_nans + 1) ** 2
        while self.position < len(self.schedule):
            self.attempts += 1
            assert self.attempts < most, "this would go on for ever"
            if self.manager.take_skipped_batch():
                self.position += 1
            elif not self._step():
                return False
        return True

    def _step(self) -> bool:
        if self.position % SNAPSHOT_EVERY == 0 and self._is_sound():
            self.ring.take(step=self.position)
        trouble = self._attempt()
        if trouble is None:
            self._update()
            self.manager.record_good_step()
            self.position += 1
            return True
        return self._recover(trouble)

    def _attempt(self) -> str | None:
        """Forward, backward, and a look; where it is bad, or None."""
        fault = self.schedule[self.position]
        if fault is not None and fault.is_transient and self.position in self.seen:
            fault = None
        self.seen.add(self.position)
        self.optimizer.zero_grad()
        if fault is not None and fault.kind == "loss":
            return "loss"
        loss = self.model(torch.ones(2, 2, dtype=self.dtype)).pow(2).mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if fault is not None:
            self._spoil(fault)
        if self.scaler is not None and self.unscales and self.dtype is torch.float32:
            self.scaler.unscale_(self.optimizer)
        bad = [(name, tensor) for name, tensor in self._state() if not all_finite([tensor])]
        if bad:
            return bad[0][0]
        return None if all_finite(gradients_of(self.optimizer)) else "gradients.0.weight"

    def _spoil(self, fault: Fault) -> None:
        gradients = gradients_of(self.optimizer)
        weight = self.model[0].weight
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        if fault.kind == "all gradients":
            for gradient in gradients:
                gradient.fill_(fault.value)
        elif fault.kind == "weight":
            weight.data[0, 0] = fault.value
        elif fault.kind == "momentum":
            for state in self.optimizer.state.get(weight, {}).values():
                if isinstance(state, torch.Tensor):
                    state.fill_(fault.value)
        elif (
            fault.kind == "element"
            or (fault.kind == "scale" and scale > 4.0)
            or (fault.kind == "rate" and self.optimizer.param_groups[0]["lr"] > 0.003)
            or (fault.kind == "precision" and not is_raised(self.model[0]))
        ):
            gradients[0].view(-1)[0] = fault.value

    def _recover(self, location: str) -> bool:
        was_sound, had_snapshot = self._is_sound(), len(self.ring) > 0
        situation = Situation(
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            snapshots=self.ring,
            module="0",
        )
        reports = [report(location)]
        recovery = self.manager.respond(reports, situation, step=self.position)
        assert recovery.succeeded != self.manager.should_abort()
        assert self._is_sound() or not (was_sound or had_snapshot or recovery.succeeded)
        if not recovery.succeeded:
            assert gradients_of(self.optimizer) == []
            return False
        self._go_on(recovery.back_at)
        return True

    def _go_on(self, back_at: int | None) -> None:
        if back_at is not None:
            self.position = back_at
        else:
            if gradients_of(self.optimizer):
                self._update()
            if self.config.skip_batch_after_nan:
                self.position += 1
        assert self._is_sound()

    def _update(self) -> None:
        if self.scaler is None or self.dtype is not torch.float32:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _state(self) -> list[tuple[str, torch.Tensor]]:
        return [*named_weights(self.model), *named_states(self.optimizer)]

    def _is_sound(self) -> bool:
        return all_finite(tensor for _, tensor in self._state())


def helpless(*_: Any) -> bool:
    return True


def unwilling(*_: Any) -> bool:
    return False


def broken(*_: Any) -> bool:
    raise ValueError("a bug in the user's own function")


def poisonous(_: Any, model: nn.Module, *__: Any) -> bool:
    next(model.parameters()).data.fill_(NAN)
    return True


def zeroing(_: Any, __: Any, optimizer: Optimizer, *___: Any) -> bool:
    for gradient in gradients_of(optimizer):
        gradient.zero_()
    return True


strategies = st.sampled_from(RecoveryStrategy)
configs = st.builds(
    RecoveryConfig,
    primary_strategy=strategies,
    fallback_strategy=strategies,
    max_consecutive_nans=st.integers(1, 6),
    custom_recovery_fn=st.sampled_from([helpless, unwilling, broken, poisonous, zeroing]),
    ladder=st.lists(
        st.builds(Rung, strategies, st.integers(1, 3), st.none() | st.integers(1, 3)), max_size=4
    ).map(tuple),
    deescalate_after=st.integers(1, 6),
    rewind_snapshots=st.integers(0, 2),
    rewind_skip_batches=st.integers(0, 5),
    snapshot_slots=st.just(3),
    skip_batch_after_nan=st.booleans(),
    drop_whole_tensors=st.booleans(),
    lower_lr_goes_back=st.booleans(),
    max_recoveries=st.none() | st.integers(0, 6),
)
faults = st.builds(
    Fault,
    st.sampled_from(Kind.__args__),  # type: ignore[attr-defined]
    st.sampled_from([NAN, INF, -INF]),
    st.booleans(),
)
schedules = st.lists(st.none() | faults, min_size=1, max_size=20)
scalers = st.sampled_from([None, GradScaler, DynamicLossScaler])


drives = {
    "schedule": schedules,
    "optimizer": st.sampled_from([SGD, Adam]),
    "scaler": scalers,
    "dtype": st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    "unscales": st.booleans(),
}


@settings(deadline=None)
@given(config=configs, **drives)
def test_any_schedule_ends_recovered_or_in_a_clean_stop(
    config: RecoveryConfig, **drive: Any
) -> None:
    check_ending(config, **drive)


going_back = st.sampled_from(
    [RecoveryStrategy.RESET_MODEL, RecoveryStrategy.REWIND, RecoveryStrategy.LOWER_LR]
)


@settings(deadline=None)
@given(
    config=st.builds(
        RecoveryConfig,
        primary_strategy=going_back,
        fallback_strategy=going_back,
        max_consecutive_nans=st.integers(1, 4),
        lower_lr_goes_back=st.just(True),
        rewind_skip_batches=st.integers(0, 2),
        skip_batch_after_nan=st.booleans(),
    ),
    **drives,
)
def test_going_back_to_the_same_bad_batch_comes_to_an_end(
    config: RecoveryConfig, **drive: Any
) -> None:
    check_ending(config, **drive)


def check_ending(
    config: RecoveryConfig,
    schedule: list[Fault | None],
    optimizer: type[Optimizer],
    scaler: type[GradScaler] | None,
    dtype: torch.dtype,
    unscales: bool,
) -> None:
    made = scaler("cpu", init_scale=16.0) if scaler is not None else None
    bench = Bench(config, schedule, optimizer, made, dtype, unscales)
    finished = bench.run()
    history = bench.manager.get_recovery_history()
    recoveries = [recovery for recovery in history if recovery.succeeded]
    assert finished == all(recovery.succeeded for recovery in history)
    assert finished or not history[-1].succeeded
    assert config.max_recoveries is None or len(recoveries) <= config.max_recoveries
    assert max((r.bad_in_a_row for r in recoveries), default=0) < config.max_consecutive_nans
    advice = bench.manager.get_recommendations()
    assert bool(advice) == bool(history)
