"""What proves a cause: experiments, a run with a change, another bad step like it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass

from stayfinite.causes import cause_of
from stayfinite.domains import HALVES
from stayfinite.records import Diagnosis, Incident, NaNType, Origin
from stayfinite.text import count

# Names that say what the operation was given: it must have been given that.
_AT_ZERO = ("log_of_zero", "division_by_zero", "sqrt_grad_at_zero", "norm_grad_at_zero")
_BELOW_ZERO = ("log_of_negative", "sqrt_of_negative", "pow_of_negative")
_OF_HALVES = ("low_precision_overflow", "mask_value_overflow", "optimizer_eps")


def is_seen_in_values(cause: str, origin: Origin) -> bool:
    """Whether the values at the operation decide the cause, so that taking them away proves it.

    Where the history of training decides (a rate, raw inputs), many a change stops the divergence,
    so that one holds proves nothing; and where several operations play together (0 * log 0, a norm
    under a where) it has several true names.
    """
    if any(each.dtype in HALVES for each in origin.inputs) and cause not in _OF_HALVES:
        return False  # it may be the precision
    if cause in _AT_ZERO and not any(each.zero_count for each in origin.inputs):
        return False
    if cause in _BELOW_ZERO and not any(each.negative_count for each in origin.inputs):
        return False
    return cause_of(cause).provable


IN_PLACE = "With this change the same step is finite"
_RUNS_AWAY = 10.0  # times all losses before it
_SPIKE = 100.0
_FEW = 5


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run with a change, from the same generator states as the run that went bad.

    `exit_code` is None when it was ended before its own end; `losses` are those of its steps.
    `was_refused`: it ended when it was about to write a file, as it could not before.
    """

    bad_step: int
    further: int
    steps: int
    losses: tuple[float, ...] = ()
    went_bad: bool = False
    exit_code: int | None = None
    was_refused: bool = False

    @property
    def holds(self) -> bool:
        """Whether it stayed finite to its end, or far beyond the bad step, and still learns."""
        if self.went_bad or not self._learns():
            return False
        if self.exit_code is None:
            return self.steps >= self.bad_step + 1 + self.further
        return (self.exit_code == 0 or self.was_refused) and self.steps > self.bad_step

    def _learns(self) -> bool:
        """Whether the loss ends no higher than before the bad step, or falls from a new level.

        Not if it shoots up on the way: that is not a cure either.
        """
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        if len(finite) < len(self.losses):
            return False
        if len(finite) < 2:
            return True
        before = _calm(finite[: max(1, min(self.bad_step, len(finite) - 1))])
        late = statistics.median(finite[-max(1, min(_FEW, len(finite) // 2)) :])
        worst = max(before)
        noise = max(worst - min(before), abs(worst) * (0.1 if len(before) > 1 else 1.0))
        top = worst + noise
        after = finite[self.bad_step :]
        if any(loss > _SPIKE * abs(top) + 1.0 for loss in after):
            return False
        falls = len(after) > 2 * _FEW and late <= statistics.median(after[:_FEW])
        return late <= top or (falls and late <= _RUNS_AWAY * abs(top))


def _calm(losses: list[float]) -> list[float]:
    """Those before the loss ran away, if it did."""
    most = abs(losses[0])
    for number, loss in enumerate(losses):
        if abs(loss) > _RUNS_AWAY * most + 1.0:
            return losses[:number]
        most = max(most, abs(loss))
    return losses


def evidence_of(trial: Trial, what: str) -> str:
    """The verification in one sentence."""
    loss = f", loss {trial.losses[-1]:.3g}" if trial.losses else ""
    steps = count(trial.steps, "step")
    is_whole = trial.exit_code == 0 and not trial.was_refused
    extent = f"all its {steps}" if is_whole else f"{steps} so far"
    return f"With this change: finite for {extent}{loss}. {what}"


def is_proven(incident: Incident, *, changed_file: str) -> bool:
    """Whether a change that holds proves the named cause: it was seen, and taken away."""
    origin, diagnosis = incident.origin, incident.diagnosis
    if origin is None or diagnosis is None or not origin.exact or origin.file is None:
        return False
    return is_seen_in_values(diagnosis.cause, origin) and changed_file.endswith(origin.file)


def alike(later: Incident, first: Incident, known: Incident) -> Incident:
    """The later incident with place and cause of the first, where the same values went bad.

    `first` is that one as it was noticed, and `known` what is known of it since. Nothing is
    measured anew, so the place is inferred and the cause no more than possible.
    """
    origin, diagnosis = known.origin, known.diagnosis
    if later.origin is not None or origin is None or diagnosis is None or not origin.exact:
        return later
    if later.rank != first.rank or not _seen(later) or _seen(later) != _seen(first):
        return later
    place = dataclasses.replace(
        origin, inputs=(), outputs=(), lineage=(), facts={"noticed_step": later.step}, exact=False
    )
    same = Diagnosis(
        cause=diagnosis.cause,
        why=f"This step was not traced. The same values went bad as at step {known.step}, so it is "
        "taken to be the same.",
        fix=diagnosis.fix,
        confidence="possible",
    )
    return dataclasses.replace(later, origin=place, diagnosis=same)


def _seen(incident: Incident) -> set[tuple[str, NaNType]]:
    # The inputs of a model are looked at in traced steps only.
    bad = (each for each in incident.reports if each.has_nan)
    return {
        (each.location, each.nan_type) for each in bad if not each.location.startswith("inputs.")
    }
