"""The samples of a bad batch, read once more from their dataset under the tracer."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.detect.finite import all_finite
from stayfinite.detect.summary import summarize
from stayfinite.explain.clue import diagnosis
from stayfinite.guard.evidence import BadValues, explain_incident
from stayfinite.locate.samples import Delivery
from stayfinite.locate.source import Place, resolve, user_place
from stayfinite.nested import Named, named_tensors
from stayfinite.records import Incident, Origin
from stayfinite.replay.moments import Moment
from stayfinite.replay.protection import ReplayEnded, call_within, protected

if TYPE_CHECKING:
    from stayfinite.guard.guard import Guard

_MOST_SECONDS = 10.0
_MOST_FAULTS = 100


@dataclasses.dataclass(frozen=True)
class SampleAgain:
    """A sample that came out bad again, and where it was made so."""

    incident: Incident
    index: Any
    dataset: str
    is_same: bool  # as the row of the batch, bit by bit

    @property
    def said(self) -> str:
        how = "the same, bit for bit" if self.is_same else "not finite again"
        return f"Sample {self.index} of {self.dataset} was read again: it came out {how}."


def sample_again(
    guard: Guard,
    incident: Incident,
    delivery: Delivery,
    batch: Any,
    before: Moment | None,
    frame: FrameType,
) -> SampleAgain | None:
    """Read the batch's samples again until one is bad; None if none is, or no operation shows.

    `before` is the moment before the loader read them: their random numbers come from there.
    Objects that are reached from the variables of `frame` are as before afterwards.
    """
    dataset, asked = delivery.source.dataset, delivery.asked
    if dataset is None or not asked or not hasattr(type(dataset), "__getitem__"):
        return None
    reading = _Reading(guard, incident, delivery, batch)
    try:
        with protected([frame]):
            if before is not None:
                before.restore_random()
            with guard.traced():
                return reading.within(_MOST_SECONDS, dataset, asked)
    except ReplayEnded:
        return None


class _Reading:
    """Reads samples, and looks for the operation of torch or NumPy that made one bad."""

    def __init__(self, guard: Guard, incident: Incident, delivery: Delivery, batch: Any) -> None:
        self._guard, self._incident, self._delivery, self._batch = guard, incident, delivery, batch

    def within(self, seconds: float, dataset: Any, asked: Sequence[Any]) -> SampleAgain | None:
        try:
            found: SampleAgain | None = call_within(seconds, self._read, dataset, asked)
        except Exception:
            return None  # a sample that cannot be read again
        return found

    def _read(self, dataset: Any, asked: Sequence[Any]) -> SampleAgain | None:
        for row, index in enumerate(asked):
            with _numpy_faults() as faults:
                sample = dataset[index]
            named = list(named_tensors(sample, "sample"))
            with self._guard.past.tracing.paused():
                bad = [(name, tensor) for name, tensor in named if not all_finite([tensor])]
                if not bad:
                    continue
                found = self._by_torch(bad) or self._by_numpy(bad, faults)
                if found is None:
                    return None
                is_same = any(self._is_row(row, tensor) for _, tensor in bad)
                sample_index = self._delivery.sample(index)
                return SampleAgain(found, sample_index, self._delivery.dataset, is_same)
        return None

    def _by_torch(self, bad: list[Named]) -> Incident | None:
        guard = self._guard
        explained = explain_incident(
            self._incident, BadValues(bad), guard.evidence, guard.past.tracing, guard.settings
        )
        origin = explained.origin
        if origin is None or not origin.exact or not origin.op:
            return None
        origin = dataclasses.replace(origin, phase="data")
        return dataclasses.replace(explained, origin=origin, step=self._incident.step)

    def _by_numpy(self, bad: list[Named], faults: list[tuple[str, Place]]) -> Incident | None:
        places = list(dict.fromkeys(place for _, place in faults))
        if not places:
            return None
        span = resolve(places[0], folder=self._guard.settings.folder)._asdict()
        span.pop("expression")
        name, tensor = bad[0]
        # Of several, the one whose result got into the sample is not known.
        is_only = len(places) == 1
        origin = Origin(phase="data", outputs=(summarize(name, tensor),), exact=is_only, **span)
        found = diagnosis(
            "bad_input_data",
            f"NumPy found a {faults[0][0]} on this line as the sample was read, and the sample is "
            "not finite.",
            "Keep the formula in its range there, or drop the sample.",
            sure="likely" if is_only else "possible",
        )
        return dataclasses.replace(self._incident, origin=origin, diagnosis=found)

    def _is_row(self, row: int, tensor: Tensor) -> bool:
        """Whether a tensor of the batch has this one as its row, bit by bit."""
        own = tensor.detach().cpu().contiguous()
        for _, other in named_tensors(self._batch, ""):
            if other.ndim and len(other) > row and other[row].shape == own.shape:
                one = other[row].detach().cpu().contiguous()
                if one.dtype == own.dtype and _bytes(one) == _bytes(own):
                    return True
        return False


def _bytes(tensor: Tensor) -> bytes:
    return tensor.view(-1).view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def _numpy_faults() -> Iterator[list[tuple[str, Place]]]:
    """Where NumPy divides by zero, overflows or computes something invalid in the block."""
    found: list[tuple[str, Place]] = []

    def note(kind: str, flag: int) -> None:
        if (place := user_place(sys._getframe(1))) is not None and len(found) < _MOST_FAULTS:
            found.append((kind, place))

    with np.errstate(divide="call", over="call", invalid="call", call=note):
        yield found
