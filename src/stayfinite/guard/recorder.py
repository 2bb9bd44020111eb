"""What a run directory gets from a training step."""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stayfinite.detect.detector import take_terms
from stayfinite.detect.memory import local
from stayfinite.distributed import rank as own_rank
from stayfinite.distributed import world_size
from stayfinite.guard.evidence import Evidence
from stayfinite.living import Names
from stayfinite.records import Forecast, Incident, to_data
from stayfinite.report.store.writer import End, LayerRow, RunInfo, StepRow, StoreWriter, run_info
from stayfinite.safely import Safely
from stayfinite.training import params_of

_EVERY = 16  # steps between two samples of the gradients
_MOST_PASSES = 64
_LONGEST = 1.0  # seconds that a step waits until it is handed over


class Recorder:
    """Hands steps, sampled gradients and incidents to a writer, which is made with the first.

    On the CPU a step costs a few microseconds, and a sample two passes over the gradients. What
    is on another device is read together, once for all steps that are handed over.
    """

    def __init__(self, writer: Callable[[], StoreWriter]) -> None:
        self._make_writer = writer
        self._writer: StoreWriter | None = None
        self._began = self._handed = time.perf_counter()
        self._last: float | None = None  # when the step before ended
        self._rows: list[StepRow] = []
        self._layers: weakref.WeakKeyDictionary[Optimizer, _Layers] = weakref.WeakKeyDictionary()
        self._passes: list[StepRow] | None = []  # of backward passes; None: an optimizer steps
        self._bad_loss: Any = None  # of the last pass that was recorded
        self._failures = Safely("stayfinite stops recording this run")

    @property
    def writer(self) -> StoreWriter:
        if self._writer is None:
            self._writer = self._make_writer()
        return self._writer

    def stepped(self, optimizer: Optimizer, evidence: Evidence, *, skipped: bool) -> None:
        """An update was attempted; the evidence has what was seen in this step."""
        self._passes = None
        if not self._failures.has_failed:
            try:
                self._add(optimizer, evidence, skipped=skipped)
            except Exception as error:
                self._failures.note(error)

    def passed(self, evidence: Evidence) -> None:
        """A backward pass is over, before any optimizer has stepped; there may be none."""
        if self._passes is None or self._failures.has_failed:
            return
        now = time.perf_counter()
        seconds = None if self._last is None else now - self._last
        # Nothing but an update takes a bad loss back, so it may be one of a pass before.
        step, is_bad = evidence.backward_passes - 1, evidence.bad_loss is not self._bad_loss
        self._bad_loss = evidence.bad_loss
        loss = evidence.bad_loss if is_bad else evidence.loss
        row = StepRow(step=step, time=now - self._began, seconds=seconds, loss=loss, skipped=is_bad)
        self._passes.append(row)
        self._last = now
        if len(self._passes) >= _MOST_PASSES:  # no accumulation is as long: the script updates
            self._hand_over_passes()

    def _hand_over_passes(self) -> None:
        if self._passes:
            self._rows += self._passes
            self._passes = []
            self.hand_over()

    def _add(self, optimizer: Optimizer, evidence: Evidence, *, skipped: bool) -> None:
        now = time.perf_counter()
        layers = self._layers.get(optimizer)
        if layers is None:
            layers = self._layers[optimizer] = _Layers(number=len(self._layers))
        groups = optimizer.param_groups
        row = StepRow(
            step=evidence.count(optimizer),
            time=now - self._began,
            seconds=None if self._last is None else now - self._last,
            loss=evidence.loss if evidence.bad_loss is None else evidence.bad_loss,
            norm=evidence.grad_norm,
            lr=groups[0].get("lr") if groups else None,
            scale=evidence.scale if skipped else None,  # in the others it has not changed much
            skipped=skipped,
            terms=take_terms(),
            optimizer=layers.number,
        )
        self._rows.append(row)
        if row.step % _EVERY == 0 and not skipped:
            if evidence.scaler is not None:
                row.scale = float(evidence.scaler.get_scale())  # host sync
            self._sample(optimizer, layers, row)
        if len(self._rows) >= _EVERY or now - self._handed > _LONGEST:
            self.hand_over()
            self._handed = now
        self._last = time.perf_counter()

    def heard(self, incident: Incident) -> None:
        """Record an incident, with all steps before it."""
        self.hand_over()
        self.writer.incident(incident)

    def on_forecast(self, forecast: Forecast) -> None:
        """Record a forecast, with all steps before it."""
        self.hand_over()
        self.writer.forecast(forecast)

    def hand_over(self) -> None:
        """Give the steps that are kept here to the writer."""
        rows, self._rows = self._rows, []
        if rows:
            _read(rows)
            self.writer.steps(rows)

    def end(self, *, is_finite: bool) -> None:
        """Record that it ended, if there is a record at all."""
        self._hand_over_passes()
        self.hand_over()
        if self._writer is not None:
            lasted = time.perf_counter() - self._began
            self._writer.end(End(exit="finite" if is_finite else "incident", time=lasted))

    def _sample(self, optimizer: Optimizer, layers: _Layers, row: StepRow) -> None:
        params = [param for param in params_of(optimizer) if param.grad is not None]
        gradients = [param.grad for param in params if param.grad is not None]
        norms, largest = _sizes(gradients)
        if not norms:
            return
        if layers.params != [id(param) for param in params]:
            layers.params = [id(param) for param in params]
            names = Names()
            named = [names.tensor(param) or f"parameter {n}" for n, param in enumerate(params)]
            self.writer.layers(named, optimizer=layers.number)
        if row.norm is None:
            row.norm = math.hypot(*norms)
        room = [_headroom(g.dtype, size) for g, size in zip(gradients, largest, strict=True)]
        sample = LayerRow(step=row.step, norms=norms, headroom=room, optimizer=layers.number)
        self.writer.norms(sample)


def recorder_in(folder: str | os.PathLike[str], *, config: Any) -> Recorder:
    """A recorder of this process in a folder, or beside it if it has a run in it already."""
    started, rank = time.time(), own_rank()
    chosen, number = Path(folder).absolute(), 2
    while (chosen / f"rank-{rank}.jsonl").exists():
        chosen, number = Path(f"{Path(folder).absolute()}-{number}"), number + 1

    def info() -> RunInfo:
        script = sys.argv[0] if sys.argv and sys.argv[0].endswith(".py") else ""
        return run_info(
            started=started,
            script=os.path.abspath(script) if script else "",
            rank=rank,
            world=world_size(),
            seed=torch.initial_seed(),
            config=to_data(config) if config is not None else {},
        )

    return Recorder(lambda: StoreWriter(chosen, info))


@dataclass(slots=True)
class _Layers:
    """One optimizer, and the parameters whose names are recorded."""

    number: int
    params: list[int] = field(default_factory=list)


def _sizes(gradients: list[Tensor]) -> tuple[list[float], list[float]]:
    """Norm and largest magnitude of each; empty where torch has no such kernel."""
    gradients = [local(gradient) for gradient in gradients]
    plain = [gradient for gradient in gradients if type(gradient) is Tensor and gradient.numel()]
    if not plain or len(plain) < len(gradients):
        return [], []
    try:
        with torch.no_grad():
            # All norms in one call; torch.nn.utils.get_total_norm gives only their norm.
            return _numbers(torch._foreach_norm(plain)), _largest(plain)
    except (RuntimeError, NotImplementedError):  # sparse
        return [], []


def _largest(tensors: list[Tensor]) -> list[float]:
    if not all(tensor.is_cpu for tensor in tensors):
        return _numbers(torch._foreach_norm(tensors, math.inf))
    # On the CPU that norm takes ten times as long as the smallest and the largest value.
    ends = [torch.aminmax(tensor) for tensor in tensors]
    low, high = _numbers([end.min for end in ends]), _numbers([end.max for end in ends])
    return [max(-a, b) for a, b in zip(low, high, strict=True)]


def _numbers(values: list[Tensor] | tuple[Tensor, ...]) -> list[float]:
    """One host read for each device."""
    found: dict[int, float] = {}
    by_device: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        by_device.setdefault(value.device, []).append(place)
    for places in by_device.values():
        stacked = torch.stack([values[place].double() for place in places])
        found.update(zip(places, stacked.tolist(), strict=True))  # host sync
    return [found[place] for place in range(len(values))]


def _headroom(dtype: torch.dtype, size: float) -> float:
    """The doublings that are left; with nothing to double, those of the whole range."""
    limits = torch.finfo(dtype)
    if not math.isfinite(size):
        return 0.0
    return math.log2(limits.max) - math.log2(max(size, limits.tiny))


def _read(rows: list[StepRow]) -> None:
    """Bring losses, scales, rates and terms that are tensors to the host."""
    for name in ("loss", "lr", "scale"):
        far = [row for row in rows if isinstance(getattr(row, name), Tensor)]
        if far:
            values = _numbers([getattr(row, name).detach().reshape(()) for row in far])
            for row, value in zip(far, values, strict=True):
                setattr(row, name, value)
    for row in rows:
        if row.terms is not None:
            row.terms = {name: float(value) for name, value in row.terms.items()}  # host sync
