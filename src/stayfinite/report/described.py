"""What one would look at first in an incident."""

from __future__ import annotations

import dataclasses

from stayfinite.records import Incident, TensorSummary


def guilty_tensor(incident: Incident) -> TensorSummary | None:
    """The tensor that went bad first, as far as it is known: made by the origin, or noticed."""
    made = incident.origin.outputs if incident.origin is not None else ()
    for tensor in made:
        if tensor.bad_count:
            return tensor
    for report in incident.reports:
        if report.has_nan and report.tensor_stats:
            names = {each.name for each in dataclasses.fields(TensorSummary)}
            stats = {key: value for key, value in report.tensor_stats.items() if key in names}
            return TensorSummary(name=report.location, shape=report.tensor_shape or (), **stats)
    return None
