"""When a replay counts as the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from stayfinite.capsule.reproduces import compare_incidents, reproduces
from stayfinite.detect.summary import summarize
from stayfinite.records import Incident, NaNReport, NaNType, Origin

BAD = summarize("output", torch.tensor([1.0, -torch.inf]))
THERE = Incident(
    step=7,
    reports=(NaNReport(has_nan=True, nan_type=NaNType.NAN, location="loss", tensor_shape=()),),
    origin=Origin(
        phase="forward", op="aten.log.default", file="a.py", line=3, outputs=(BAD,), exact=True
    ),
)


def with_origin(**changes: Any) -> Incident:
    assert THERE.origin is not None
    return dataclasses.replace(THERE, origin=dataclasses.replace(THERE.origin, **changes))


@pytest.mark.parametrize(
    ("here", "same"),
    [
        (THERE, True),
        (dataclasses.replace(THERE, step=8), True),
        (with_origin(module="inner"), True),
        (with_origin(line=4), False),
        (with_origin(file="b.py"), False),
        (with_origin(op="aten.exp.default"), False),
        (with_origin(outputs=(summarize("output", torch.tensor([1.0, torch.nan])),)), False),
        (with_origin(node="LogBackward0"), False),
        (dataclasses.replace(THERE, origin=None), False),
        (None, False),
    ],
)
def test_operation_line_and_value_decide(here: Incident | None, same: bool) -> None:
    assert reproduces(compare_incidents(THERE, here)) is same


def test_files_outside_the_project_are_known_by_name() -> None:
    there, here = with_origin(file="/home/me/lib/a.py"), with_origin(file="/tmp/x/project-1/a.py")
    assert reproduces(compare_incidents(there, here))
    assert not reproduces(compare_incidents(there, with_origin(file="/tmp/x/project-1/b.py")))


def test_untraced_incident_is_compared_by_what_was_noticed() -> None:
    untraced = dataclasses.replace(THERE, origin=None)
    assert reproduces(compare_incidents(untraced, THERE))
    other = dataclasses.replace(THERE.reports[0], location="gradients.weight")
    assert not reproduces(compare_incidents(untraced, dataclasses.replace(THERE, reports=(other,))))
    assert not reproduces(compare_incidents(untraced, None))


def test_number_of_a_lone_step_is_not_compared() -> None:
    assert "step" not in [point.name for point in compare_incidents(THERE, THERE, with_step=False)]
