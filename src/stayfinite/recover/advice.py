"""What was done about bad steps, and what to change because of it. No torch here."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stayfinite.causes import CAUSES, Kind, cause_of
from stayfinite.records import Incident
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.report.store.reading import Run, Series
from stayfinite.text import count

_EARLY = 1000  # steps in which a warm-up would still be at work
_FIRST = 10  # steps in which the initial weights still decide
_LAST = 1000  # good steps of a recorded run that are looked at
_GROWTH = 4.0  # times the median: the norm was running away

# How much is known decides before how often it happened.
_DIAGNOSED, _SEEN_TO_HELP, _LIKELY, _POSSIBLE = 4.0, 3.0, 2.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What was done about one bad step.

    `tried` are the strategies that could not help, each with its reason, and `bad_in_a_row` is
    which bad step of its streak this was. `back_at` is the step of a snapshot that was restored,
    `checkpoint` the file that was loaded, None where there was none. `lr`, `scale` and `dtype`
    (the narrowest of the parameters) are as they were found; None where there is none.

    >>> Recovery(step=7, location="loss", strategy=RecoveryStrategy.SKIP_STEP, succeeded=True).lr
    """

    step: int
    location: str
    strategy: RecoveryStrategy
    succeeded: bool
    detail: str = ""
    tried: tuple[tuple[RecoveryStrategy, str], ...] = ()
    cause: str | None = None
    module: str | None = None
    bad_in_a_row: int = 1
    back_at: int | None = None
    checkpoint: str | None = None
    lr: float | None = None
    scale: float | None = None
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Past:
    """All that the advice is drawn from; `norms`, `losses` and `rates` are of good steps."""

    recoveries: Sequence[Recovery]
    config: RecoveryConfig
    norms: Sequence[float] = ()
    losses: Sequence[float] = ()
    rates: Sequence[float] = ()
    is_streak_over: bool = True

    def share(self, of: Callable[[Recovery], bool]) -> float:
        """Of how many of the bad steps this is true, from 0 to 1."""
        return sum(map(of, self.recoveries)) / len(self.recoveries)

    def caused_by(self, kind: Kind) -> float:
        return self.share(lambda bad: cause_of(bad.cause).kind == kind)

    @property
    def undiagnosed(self) -> float:
        return self.share(lambda bad: bad.cause in (None, "unknown"))

    @property
    def is_running_away(self) -> bool:
        """Whether the norms or losses of the last good steps were far above the usual."""
        return any(
            len(values) >= 8 and values[-1] > _GROWTH * statistics.median(values) > 0
            for values in (self.norms, self.losses)
        )

    def ended_streaks(self, strategy: RecoveryStrategy) -> tuple[int, int]:
        """How many streaks ended with this strategy, of how many times it was used."""
        ended = used = 0
        following = [later.bad_in_a_row == 1 for later in self.recoveries[1:]]
        for bad, was_last in zip(self.recoveries, [*following, self.is_streak_over], strict=True):
            used += bad.strategy is strategy
            ended += bad.strategy is strategy and was_last
        return ended, used


Advice = tuple[float, str]
"""How much it weighs, and what it says."""


def recommendations(past: Past) -> list[str]:
    """Sentences that say what to change, ranked; none when nothing has happened."""
    if not past.recoveries:
        return []
    advice = [each for rule in RULES for each in rule(past)]
    ranked = sorted(advice, key=lambda each: -each[0])
    return list(dict.fromkeys(text for _, text in ranked))


def fix_the_cause(past: Past) -> Iterator[Advice]:
    causes = Counter(bad.cause for bad in past.recoveries if bad.cause in CAUSES)
    for slug, times in causes.items():
        if slug not in (None, "unknown"):
            cause = CAUSES[slug]
            found = {bad.module for bad in past.recoveries if bad.cause == slug and bad.module}
            where = f" in {', '.join(sorted(found))}" if found else ""
            text = f"{cause.title}{where}, at {_times(past, times)}: {cause.fix}"
            yield _DIAGNOSED + times / len(past.recoveries), text


def lower_the_rate(past: Past) -> Iterator[Advice]:
    rates = [bad.lr for bad in past.recoveries if bad.lr]
    helped, _ = past.ended_streaks(RecoveryStrategy.LOWER_LR)
    weight = _strength(past, helped, past.caused_by("dynamics"))
    if not rates or not weight:
        return
    factor = past.config.lr_reduction_factor
    lowered = [b.lr for b in past.recoveries if b.strategy is RecoveryStrategy.LOWER_LR and b.lr]
    target = lowered[-1] * factor if helped and lowered else min(rates) * factor
    why = f"it was {rates[-1]:.3g} at the last bad step"
    if helped:
        why += f", and lowering it ended {count(helped, 'streak')}"
    elif past.rates:
        why += f"; good steps ran at up to {max(past.rates):.3g}"
    yield weight, f"Lower the learning rate to {target:.2g}: {why}."


def clip_gradients(past: Past) -> Iterator[Advice]:
    helped, _ = past.ended_streaks(RecoveryStrategy.CLIP_GRADIENTS)
    weight = _strength(past, helped, past.caused_by("dynamics"))
    if not weight:
        return
    if len(past.norms) >= 2:
        usual, ordered = statistics.median(past.norms), sorted(past.norms)
        limit = high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        why = f"the norm of good steps was {usual:.3g} as a rule, and at most {high:.3g} in 95%"
    else:
        limit = past.config.grad_clip_value or RecoveryConfig().grad_clip_value or 1.0
        why = "no norms of good steps were recorded to choose it from"
    if helped:
        why += f"; clipping has ended {count(helped, 'streak')}"
    call = f"stayfinite.clip_gradients(model, {limit:.2g})"
    yield weight - 0.05, f"Clip the gradients at {limit:.2g}, `{call}`: {why}."


def widen_the_range(past: Past) -> Iterator[Advice]:
    scales = [bad.scale for bad in past.recoveries if bad.scale is not None]
    is_half = past.share(lambda bad: bad.dtype == "float16" or bad.scale is not None)
    if is_half:
        known = past.caused_by("precision")
        text = "Train in bfloat16 instead of float16: its range is that of float32"
        text += ", and it needs no loss scale." if scales else "."
        if scales and min(scales) <= 1.0:
            text = f"{text[:-1]} (which was down to {min(scales):g})."
        yield (_DIAGNOSED + known if known else _LIKELY + is_half / 2) - 0.1, text
    raised = [b for b in past.recoveries if b.strategy is RecoveryStrategy.RAISE_PRECISION]
    for module in dict.fromkeys(bad.module for bad in raised if bad.module):
        text = f"Keep {module} in float32: it made the bad values in lower precision."
        yield _SEEN_TO_HELP + len(raised) / len(past.recoveries), text


def warm_up(past: Past) -> Iterator[Advice]:
    def may_be_updates(bad: Recovery) -> bool:
        """Whether it is not known to come from one operation or batch."""
        is_unknown = bad.cause in (None, "unknown")
        return not _is_data(bad) and (is_unknown or cause_of(bad.cause).kind == "dynamics")

    early = past.share(lambda bad: bad.step < _EARLY and may_be_updates(bad))
    last = max(bad.step for bad in past.recoveries)
    if early and last < _EARLY and past.undiagnosed + past.caused_by("dynamics"):
        length = max(100, 2 * (last + 1))
        text = f"Warm the learning rate up over the first {length} steps: "
        yield _POSSIBLE + early, f"{text}the last bad one was step {last}."


def look_at_the_data(past: Past) -> Iterator[Advice]:
    bad = [each for each in past.recoveries if _is_data(each)]
    if bad:
        where = _most_common(each.location for each in bad if each.location.startswith("inputs"))
        what = f"{where} was" if where else "the batches were"
        text = f"Look at the data: {what} bad at {_steps(bad)}; skip those samples."
        yield _DIAGNOSED + len(bad) / len(past.recoveries), text


def look_at_the_loss(past: Past) -> Iterator[Advice]:
    bad = [b for b in past.recoveries if b.location.partition(".")[0] == "loss"]
    if bad:
        name = _most_common(each.location for each in bad) or "loss"
        term = name.partition(".")[2]
        what = f"the loss term {term!r}" if term else "the loss itself, before any gradient,"
        text = f"Look at how {what} is computed: it was not finite at {_steps(bad)}."
        yield _LIKELY + len(bad) / len(past.recoveries) / 2 - 0.2, text


def look_at_the_layer(past: Past) -> Iterator[Advice]:
    first = [
        b
        for b in past.recoveries
        if cause_of(b.cause).kind == "init" or (b.step < _FIRST and _layer(b))
    ]
    layers = Counter(layer for bad in past.recoveries if (layer := _layer(bad)))
    if first:
        layer = _most_common(_layer(bad) for bad in first)
        name = f"of {layer}" if layer else "of the weights"
        text = f"Initialize the weights {name} smaller, such as `nn.init.normal_(w, std=0.02)`"
        known = any(cause_of(bad.cause).kind == "init" for bad in first)
        why = f"bad from step {min(bad.step for bad in first)} on"
        yield (_DIAGNOSED if known else _POSSIBLE) + 0.3, f"{text}: {why}."
    if layers:
        layer, times = layers.most_common(1)[0]
        text = f"Look at {layer} first: it is where {_times(past, times)} showed."
        yield _POSSIBLE + times / len(past.recoveries) / 2, text


def change_the_strategy(past: Past) -> Iterator[Advice]:
    found = {each: past.ended_streaks(each) for each in RecoveryStrategy}
    best = max(found, key=lambda each: found[each])
    ended, used = found[best]
    first, first_used = found[past.config.primary_strategy]
    if not past.config.ladder and ended > first and first_used:
        text = f"Use primary_strategy={best.value!r}: it ended {count(ended, 'streak')} in {used}"
        yield _SEEN_TO_HELP, f"{text} uses, {past.config.primary_strategy.value!r} {first}."


def keep_snapshots(past: Past) -> Iterator[Advice]:
    missed = past.share(lambda bad: any("no snapshot" in reason for _, reason in bad.tried))
    if missed:
        every = past.config.snapshot_every
        text = f"Call manager.snapshot(...) every {every} good steps: without one there was "
        yield _LIKELY + missed, f"{text}nothing to go back to at {missed:.0%} of bad steps."


RULES: tuple[Callable[[Past], Iterator[Advice]], ...] = (
    fix_the_cause,
    look_at_the_data,
    lower_the_rate,
    clip_gradients,
    widen_the_range,
    warm_up,
    look_at_the_loss,
    look_at_the_layer,
    change_the_strategy,
    keep_snapshots,
)


def _strength(past: Past, helped: int, known: float) -> float:
    """How sure it is that calmer updates would have helped; 0 if nothing points there."""
    if known:
        return _DIAGNOSED + known
    if helped:
        return _SEEN_TO_HELP + helped / len(past.recoveries)
    if past.is_running_away:
        return _LIKELY + past.undiagnosed
    return _POSSIBLE + past.undiagnosed / 2 if past.undiagnosed else 0.0


def _is_data(bad: Recovery) -> bool:
    return cause_of(bad.cause).kind == "data" or bad.location.startswith("inputs")


def _layer(bad: Recovery) -> str | None:
    """The module that is to blame, or else the one whose parameter showed it."""
    kind, _, name = bad.location.partition(".")
    if bad.module or kind not in ("gradients", "parameters", "buffers"):
        return bad.module or None
    return name.rpartition(".")[0] or None


def _most_common(names: Iterator[str | None] | Sequence[str | None]) -> str | None:
    counts = Counter(name for name in names if name)
    return counts.most_common(1)[0][0] if counts else None


def _times(past: Past, times: int) -> str:
    total = len(past.recoveries)
    return f"{times} of {total} bad steps" if total > 1 else "the bad step"


def _steps(bad: Sequence[Recovery]) -> str:
    numbers = list(dict.fromkeys(each.step for each in bad))
    said = ", ".join(map(str, numbers[:5])) + (" and others" if len(numbers) > 5 else "")
    return f"step {said}" if len(numbers) == 1 else f"steps {said}"


def recommendations_of(run: Run) -> list[str]:
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
