"""Weights or data, which term of the loss, and whether smaller steps would have helped."""

from __future__ import annotations

from stayfinite.explain.experiments.findings import Finding
from stayfinite.explain.experiments.lab import Lab
from stayfinite.explain.experiments.replays import AS_IT_WAS, Change

_LESS = 0.1
_SMALLER = 1 / 16
_CLIP = 1.0


def guarded(lab: Lab) -> Finding | None:
    """Whether the step is finite once the operation is kept inside its domain."""
    change = Change(is_guarded=True)
    if lab.is_finite(change):
        return Finding(
            experiment="guarded",
            verdict="guilty",
            sentence="with that operation kept inside its domain, the same step is finite",
            reproduces=not lab.run(AS_IT_WAS).is_finite,
            vanishes=True,
            removal=change,
        )
    if lab.fails(change):
        said = "with that operation kept inside its domain, the step goes bad all the same"
        return Finding(experiment="guarded", verdict="innocent", sentence=said)
    return None


def terms(lab: Lab) -> Finding | None:
    """Which terms of the loss go bad alone; None if it is no sum, or all or none do."""
    names = lab.replays.terms
    if len(names) < 2:
        return None
    is_bad = [lab.fails(Change(term=number)) for number in range(len(names))]
    is_good = [lab.is_finite(Change(term=number)) for number in range(len(names))]
    bad = [name for name, flag in zip(names, is_bad, strict=True) if flag]
    good = [name for name, flag in zip(names, is_good, strict=True) if flag]
    if not bad or not good:
        return None
    verb = "goes" if len(bad) == 1 else "go"
    said = f"of the terms of the loss, {' and '.join(bad)} {verb} bad alone"
    if len(bad) + len(good) == len(names):
        said += f", and {' and '.join(good)} alone {'is' if len(good) == 1 else 'are'} finite"
    return Finding(experiment="terms", verdict="guilty", sentence=said, reproduces=True)


def weights(lab: Lab) -> Finding | None:
    """Whether the batch goes bad on earlier weights too."""
    for number in range(lab.replays.snapshots):
        change = Change(snapshot=number)
        if lab.is_finite(change):
            said = "with the weights of an earlier snapshot the same batch is finite"
            return Finding(experiment="weights", verdict="depends", sentence=said, vanishes=True)
        if lab.fails(change) and number == lab.replays.snapshots - 1:
            said = "with earlier weights the same batch goes bad too: it is not the weights"
            return Finding(experiment="weights", verdict="innocent", sentence=said)
    return None


def dynamics(lab: Lab, *, steps: int) -> list[Finding]:
    """Whether the last steps, run again in gentler ways, end well: one finding for each way.

    Only if they end badly as they were.
    """
    if steps < 1 or not lab.fails(Change(steps=steps)):
        return []
    many = "the last step" if steps == 1 else f"the last {steps} steps"
    ways = [
        (Change(steps=steps, learning_rate=_LESS), "a tenth of the learning rate"),
        (Change(steps=steps, clip=_CLIP), f"gradients clipped to a norm of {_CLIP:g}"),
        (Change(steps=steps, loss_scale=_SMALLER), "a sixteenth of the loss scale"),
    ]
    tried = [_gentler(lab, change, f"with {how} over {many}") for change, how in ways]
    return [each for each in tried if each is not None]


def _gentler(lab: Lab, change: Change, what: str) -> Finding | None:
    if lab.is_finite(change):
        return Finding(
            experiment="dynamics",
            verdict="depends",
            sentence=f"{what} this one is finite",
            reproduces=True,
            vanishes=True,
        )
    if lab.fails(change):
        said = f"{what} it goes bad all the same"
        return Finding(experiment="dynamics", verdict="innocent", sentence=said)
    return None
