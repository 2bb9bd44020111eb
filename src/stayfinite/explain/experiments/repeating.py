"""The same step once more, and in other precisions, and without the compiler."""

from __future__ import annotations

from stayfinite.explain.experiments.findings import Finding
from stayfinite.explain.experiments.lab import Lab
from stayfinite.explain.experiments.replays import AS_IT_WAS, CannotReplayError, Change, Precision
from stayfinite.records import REPEATED


def repeated(lab: Lab) -> Finding:
    """Whether the failure comes back when nothing is changed."""
    try:
        first = lab.run(AS_IT_WAS)
        second = lab.run(AS_IT_WAS, anew=True)
    except CannotReplayError as error:
        return _repeats("inconclusive", f"the step could not be replayed: {error}")
    if first.is_finite and second.is_finite:
        return _repeats("transient", "the same step, run twice more, was finite both times")
    if first.is_like(second):
        return _repeats("deterministic", REPEATED)
    if first.is_finite or second.is_finite:
        said = (
            "the same step, run twice more, was bad once and finite once: it is not deterministic"
        )
        return _repeats("inconclusive", said)
    said = "the same step, run twice more, went bad in two places: it is not deterministic"
    return _repeats("inconclusive", said)


def _repeats(verdict: str, sentence: str) -> Finding:
    is_same = verdict == "deterministic"
    return Finding(
        experiment="repeat",
        verdict=verdict,  # type: ignore[arg-type]
        sentence=sentence,
        reproduces=is_same,
    )


def precise(lab: Lab) -> list[Finding]:
    """Whether it is finite in float32 and in float64; only what could be run is said."""
    return [
        found
        for precision in ("float32", "float64")
        if (found := _in_precision(lab, precision)) is not None
    ]


def _in_precision(lab: Lab, precision: Precision) -> Finding | None:
    change = Change(precision=precision)
    if lab.is_finite(change):
        return Finding(
            experiment=precision,
            verdict="depends",
            sentence=f"in {precision} the same step is finite",
            reproduces=not lab.run(AS_IT_WAS).is_finite,
            vanishes=True,
            removal=change,
        )
    if lab.fails(change):
        said = f"in {precision} the same step goes bad at the same place"
        return Finding(experiment=precision, verdict="innocent", sentence=said)
    return None


def compiled(lab: Lab) -> Finding | None:
    """Whether only the compiled code goes bad, or only the eager one; None if neither is known."""
    try:
        optimised = lab.run(Change(is_compiled=True))
        eager = lab.run(Change(is_compiled=False))
    except CannotReplayError:
        return None
    if eager.is_finite == optimised.is_finite:
        return None
    which, other = ("compiled", "eager") if eager.is_finite else ("eager", "compiled")
    said = f"the {which} step goes bad and the {other} one is finite, from the same state"
    return Finding(
        experiment="compiled", verdict="depends", sentence=said, reproduces=True, vanishes=True
    )
