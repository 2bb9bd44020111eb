"""A bad step that was not traced is told beside one that was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stayfinite.explain.proof import alike
from stayfinite.records import Diagnosis, Incident, NaNReport, NaNType, Origin, TensorSummary


def report(location: str, kind: NaNType = NaNType.NAN) -> NaNReport:
    return NaNReport(has_nan=True, nan_type=kind, location=location, tensor_shape=())


INPUT = TensorSummary(name="x", shape=(2,), dtype="float32", device="cpu", numel=2)
NOTICED = Incident(step=25, reports=(report("loss"), report("gradients.weight")))
KNOWN = replace(
    NOTICED,
    reports=NOTICED.reports[:1],  # a second run may stop at the loss
    origin=Origin(phase="forward", file="train.py", line=17, inputs=(INPUT,), exact=True),
    diagnosis=Diagnosis(cause="log_of_zero", why="it is 0", fix="clamp it", confidence="proven"),
)
LATER = replace(NOTICED, step=40)


def test_the_same_values_are_taken_to_have_the_same_cause() -> None:
    told = alike(LATER, NOTICED, KNOWN)
    assert (told.step, told.reports) == (40, LATER.reports)
    assert told.origin is not None
    assert told.diagnosis is not None
    assert (told.origin.file, told.origin.line, told.origin.exact) == ("train.py", 17, False)
    assert told.origin.inputs == ()  # those were of another step
    assert (told.diagnosis.cause, told.diagnosis.confidence) == ("log_of_zero", "possible")
    assert "at step 25" in told.diagnosis.why


@pytest.mark.parametrize(
    ("later", "known"),
    [
        (replace(LATER, reports=(report("loss"),)), KNOWN),
        (replace(LATER, reports=(report("loss", NaNType.POS_INF), LATER.reports[1])), KNOWN),
        (replace(LATER, reports=()), KNOWN),
        (replace(LATER, rank=1), KNOWN),
        (replace(LATER, origin=Origin(phase="backward")), KNOWN),
        (LATER, NOTICED),
        (LATER, replace(KNOWN, origin=Origin(phase="forward", exact=False))),
    ],
)
def test_anything_else_stays_unknown(later: Incident, known: Incident) -> None:
    assert alike(later, NOTICED, known) == later
