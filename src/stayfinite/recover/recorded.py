"""What is recommended after a run that was recorded. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stayfinite.records import Incident
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.recover.recommend import Past, recommendations
from stayfinite.recover.recovery import Recovery
from stayfinite.report.store.reading import Run, Series

_LAST = 1000  # good steps that are looked at


def recommended(run: Run) -> list[str]:
    """What to change, the most promising first; nothing when nothing has happened."""
    return recommendations(past_of(run.incidents, run.series))


def past_of(incidents: Sequence[Incident], series: Series) -> Past:
    """The incidents as the recoveries they led to; one that stopped the run as given up."""
    recoveries: list[Recovery] = []
    for incident in incidents:
        before = recoveries[-1] if recoveries else None
        in_a_row = before.bad_in_a_row + 1 if before and before.step == incident.step - 1 else 1
        recoveries.append(_recovery(incident, series, in_a_row))
    last = incidents[-1].step if incidents else -1
    return Past(
        recoveries=recoveries,
        config=RecoveryConfig(),
        norms=_good(series, "norm"),
        losses=_good(series, "loss"),
        rates=_good(series, "lr"),
        is_streak_over=any(step > last for step in series["step"][-1:]),
    )


def _recovery(incident: Incident, series: Series, bad_in_a_row: int) -> Recovery:
    origin, diagnosis, outcome = incident.origin, incident.diagnosis, incident.outcome
    known = {each.value: each for each in RecoveryStrategy}
    strategy = known.get(outcome.strategy if outcome else "", RecoveryStrategy.ABORT)
    dtypes = [tensor.dtype.removeprefix("torch.") for tensor in (origin.inputs if origin else ())]
    return Recovery(
        step=incident.step,
        location=incident.reports[0].location if incident.reports else "",
        strategy=strategy,
        succeeded=strategy is not RecoveryStrategy.ABORT,
        detail=outcome.detail if outcome else "",
        cause=diagnosis.cause if diagnosis else None,
        module=origin.module if origin else None,
        bad_in_a_row=bad_in_a_row,
        lr=_at(series, "lr", incident.step),
        scale=_at(series, "scale", incident.step),
        dtype="float16" if "float16" in dtypes else None,
    )


def _at(series: Series, column: str, step: int) -> float | None:
    """The last value up to this step."""
    pairs = zip(reversed(series["step"]), reversed(series[column]), strict=True)
    found = (value for at, value in pairs if at <= step and value is not None)
    value = next(found, None)
    return value if value is not None and math.isfinite(value) else None


def _good(series: Series, column: str) -> list[float]:
    rows = zip(series[column][-_LAST:], series["skipped"][-_LAST:], strict=True)
    return [value for value, bad in rows if value is not None and not bad and math.isfinite(value)]
