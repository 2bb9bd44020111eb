"""A bad step that was not looked at, beside one that was."""

from __future__ import annotations

import dataclasses

from stayfinite.records import Diagnosis, Incident, NaNType


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
