"""What proves a cause: counterfactual replays of a bad step, a run with a change, a step like it.

Pure procedures over whoever can replay the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Protocol

from stayfinite.budget import Budget
from stayfinite.causes import cause_of
from stayfinite.domains import HALVES
from stayfinite.records import REPEATED, Diagnosis, Incident, NaNType, Origin
from stayfinite.text import bare_name, count, in_words, node_name

Precision = Literal["float32", "float64"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """In what a replay differs from the step as it was; by default in nothing."""

    rows: tuple[int, ...] | None = None
    """Only these rows of the batch; one may be there twice."""
    replaced: tuple[int, int] | None = None
    """Of the first row, the values from the one to before the other are those of `donor`."""
    donor: int | None = None
    precision: Precision | None = None
    is_compiled: bool | None = None
    term: int | None = None
    """Only this term of the loss is differentiated."""
    snapshot: int | None = None
    """With the weights of so many snapshots ago, 0 the newest."""
    steps: int = 0
    """So many steps before it are run again, too."""
    learning_rate: float = 1.0
    clip: float | None = None
    """The largest norm that gradients may have in those steps."""
    loss_scale: float = 1.0
    is_guarded: bool = False
    """The operation that went bad first is kept inside its domain, as the fix says."""


AS_IT_WAS = Change()


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a replay showed: finite, or where it went bad first."""

    is_finite: bool
    op: str | None = None
    file: str | None = None
    line: int | None = None
    kind: NaNType = NaNType.NONE
    node: str | None = None
    """Of autograd, in a backward pass: one line may have a division, and a root that divides."""

    def is_like(self, other: Seen) -> bool:
        """Whether both went bad at the same place; where none is known, in the same way."""
        if self.is_finite or other.is_finite:
            return False
        if self.op is None and self.line is None and other.op is None and other.line is None:
            return self.kind is other.kind
        mine, its = ((s.op, s.node, s.file, s.line) for s in (self, other))
        return mine == its


class CannotReplayError(Exception):
    """A change that this step, or who replays it, does not allow; says why."""


class Replays(Protocol):
    """One bad step that can be run again; every run begins from the same state."""

    @property
    def rows(self) -> int:
        """How many samples the batch has; 0 if it cannot be split."""

    @property
    def values(self) -> int:
        """How many numbers one sample has; 0 if they cannot be replaced."""

    @property
    def snapshots(self) -> int:
        """How many earlier states are kept."""

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms of the loss; empty if it is no sum, or cannot be taken apart."""

    def run(self, change: Change) -> Seen:
        """Run the step with the change; CannotReplayError if that cannot be done.

        Other errors are those of the step itself.
        """


FindingVerdict = Literal[
    "deterministic",  # the same failure each time
    "transient",  # it does not come back
    "inconclusive",  # neither
    "guilty",  # what was named makes the step bad, alone
    "innocent",  # it does not
    "depends",  # the step is finite without it, and that is all that is known
]


@dataclass(frozen=True)
class Finding:
    """One experiment: what was seen, as a sentence, and what it means.

    `reproduces`: with the named cause alone the failure is there. `vanishes`: without it, the
    step is finite.
    """

    experiment: str
    verdict: FindingVerdict
    sentence: str
    _: KW_ONLY
    reproduces: bool = False
    vanishes: bool = False
    rows: tuple[int, ...] = ()
    removal: Change | None = None
    """What takes the named cause away."""

    @property
    def is_proof(self) -> bool:
        return self.reproduces and self.vanishes


def with_samples(finding: Finding, samples: Sequence[Any] | None, dataset: str) -> Finding:
    """The finding with the dataset's numbers of the rows that it names."""
    if not samples or not finding.rows or max(finding.rows) >= len(samples):
        return finding
    names = ", ".join(f"row {row} is sample {samples[row]}" for row in finding.rows)
    said = f"{finding.sentence} ({names} of the dataset {dataset})"
    return dataclasses.replace(finding, sentence=said)


def with_reason(diagnosis: Diagnosis, why_not: str | None) -> Diagnosis:
    """The diagnosis with the reason why no sample was looked for."""
    if why_not is None:
        return diagnosis
    said = f"the batch was not searched for a bad sample: {why_not}"
    return dataclasses.replace(diagnosis, evidence=(*diagnosis.evidence, said))


Progress = Callable[[str, int], None]


class OutOfTimeError(Exception):
    """The budget does not allow another replay."""


class Lab:
    """Runs replays until `seconds` are over; one that is known is not run again.

    `progress(experiment, replays so far)` is called before each replay. A replay that is
    expected to end after the budget is not begun.
    """

    def __init__(
        self,
        replays: Replays,
        *,
        seconds: float,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replays = replays
        self.count = 0
        self.doing = ""
        self._progress = progress
        self._budget = Budget(seconds, clock)
        self._longest = 0.0
        self._known: dict[Change, Seen | Exception] = {}

    def run(self, change: Change, *, anew: bool = False) -> Seen:
        """What the replay showed.

        Raises OutOfTimeError without running it, CannotReplayError if it cannot be done or the
        step itself raised.
        """
        if anew or change not in self._known:
            self._known[change] = self._run(change)
        seen = self._known[change]
        if isinstance(seen, Exception):
            raise seen
        return seen

    def fails(self, change: Change, *, anew: bool = False) -> bool:
        """Whether the step goes bad at the same place as when nothing is changed.

        False too where it raises, cannot be run, or goes bad elsewhere.
        """
        try:
            return self.run(change, anew=anew).is_like(self.run(AS_IT_WAS))
        except CannotReplayError:
            return False

    def is_finite(self, change: Change, *, anew: bool = False) -> bool:
        """Whether the step is finite with the change; False where that cannot be said."""
        try:
            return self.run(change, anew=anew).is_finite
        except CannotReplayError:
            return False

    def _run(self, change: Change) -> Seen | Exception:
        left = self._budget.left
        if self._longest > left:
            raise OutOfTimeError
        if self._progress is not None:
            self._progress(self.doing, self.count)
        self.count += 1
        try:
            return self.replays.run(change)
        except CannotReplayError as error:
            return error
        except Exception as error:  # the user's own: a batch of one that a layer refuses, say
            return CannotReplayError(f"the step raised {type(error).__name__}")
        finally:
            self._longest = max(self._longest, left - self._budget.left)


def repeat(lab: Lab) -> Finding:
    """Whether the failure comes back when nothing is changed."""
    verdict: FindingVerdict = "inconclusive"
    try:
        first, second = lab.run(AS_IT_WAS), lab.run(AS_IT_WAS, anew=True)
    except CannotReplayError as error:
        said = f"the step could not be replayed: {error}"
        return Finding("repeat", verdict, said)
    said = "the same step, run twice more, "
    if first.is_finite and second.is_finite:
        verdict, said = "transient", f"{said}was finite both times"
    elif first.is_like(second):
        verdict, said = "deterministic", REPEATED
    elif first.is_finite or second.is_finite:
        said += "was bad once and finite once: it is not deterministic"
    else:
        said += "went bad in two places: it is not deterministic"
    is_same = verdict == "deterministic"
    return Finding("repeat", verdict, said, reproduces=is_same)


def _finding_without(
    lab: Lab,
    change: Change,
    name: str,
    *,
    finite: str,
    bad: str,
    verdict: FindingVerdict = "depends",
) -> Finding | None:
    """What it means that the step is finite with the change, or bad; None if neither is known."""
    if lab.is_finite(change):
        return Finding(
            name,
            verdict,
            finite,
            reproduces=not lab.run(AS_IT_WAS).is_finite,
            vanishes=True,
            removal=change,
        )
    if lab.fails(change):
        return Finding(name, "innocent", bad)
    return None


def precise(lab: Lab) -> list[Finding]:
    """Whether it is finite in float32 and in float64; only what could be run is said."""
    precisions: tuple[Precision, ...] = ("float32", "float64")
    found = []
    for each in precisions:
        said = f"in {each} the same step"
        finite, bad = f"{said} is finite", f"{said} goes bad at the same place"
        found.append(_finding_without(lab, Change(precision=each), each, finite=finite, bad=bad))
    return [each for each in found if each is not None]


def guard_operation(lab: Lab) -> Finding | None:
    """Whether the step is finite once the operation is kept inside its domain."""
    said = "with the inputs of that operation kept inside its domain, the"
    finite, bad = f"{said} same step is finite", f"{said} step is still bad"
    change = Change(is_guarded=True)
    found = _finding_without(lab, change, "guarded", finite=finite, bad=bad, verdict="guilty")
    if found is not None:
        return found
    with contextlib.suppress(CannotReplayError):
        seen = lab.run(change)
        name = node_name(seen.node) or bare_name(seen.op or "")
        if name and seen.line is not None:
            where = f"{os.path.basename(seen.file or '')}:{seen.line}"
            way = " in its backward pass" if seen.node else ""
            moved = f"{said} step goes bad at another one, {name} at {where}{way}"
            return Finding("guarded", "inconclusive", moved)
    return None


def compare_compiled(lab: Lab) -> Finding | None:
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
    return Finding("compiled", "depends", said, reproduces=True, vanishes=True)


MOST_GUILTY = 8
_SPREAD = 4
_MOST_VALUES = 1 << 16
Rows = tuple[int, ...]


def guilty_rows(lab: Lab) -> Finding | None:
    """The rows that go bad alone in the same place; None if there is nothing to be said.

    At most 2 * log2(rows) + 4 replays for one such row, and about as many for each further one.
    No row is named that was not seen to fail alone.
    """
    total = lab.replays.rows
    if total < 2 or lab.run(AS_IT_WAS).is_finite:
        return None
    found: list[int] = []
    left, is_clean = tuple(range(total)), False
    try:
        while left and len(found) < MOST_GUILTY and (row := _one_of(lab, left)) is not None:
            found.append(row)
            left = tuple(each for each in left if each != row)
            rest = Change(rows=left)
            is_clean = bool(left) and lab.is_finite(rest) and lab.is_finite(rest, anew=True)
            if is_clean or not lab.fails(rest):
                break
            if len(found) == 1 and _is_everywhere(lab, left):
                said = f"of the {total} rows of the batch, all {_SPREAD + 1} that were tried go bad"
                said += " alone: it is not a matter of samples"
                return Finding("samples", "innocent", said)
    except OutOfTimeError:
        if not found:
            raise
    return _guilt(found, left, is_clean=is_clean) if found else _innocence(lab, total)


def _one_of(lab: Lab, rows: Rows) -> int | None:
    """One that fails alone, twice; None if the failure needs several at once.

    It is the one that is left when the half that fails is halved again and again.
    """
    while len(rows) > 1:
        half = rows[: (len(rows) + 1) // 2]
        fails = lab.fails(Change(rows=half)) if len(half) > 1 else _alone(lab, half[0]) is not None
        rows = half if fails else rows[len(half) :]
    alone = _alone(lab, rows[0])
    return rows[0] if alone is not None and lab.fails(alone, anew=True) else None


def _alone(lab: Lab, row: int) -> Change | None:
    """How the row fails alone; None if it does not."""
    once, twice = Change(rows=(row,)), Change(rows=(row, row))
    if lab.fails(once):
        return once
    # Some layers refuse a batch of one, or have no variance to divide by.
    return None if lab.is_finite(once) or not lab.fails(twice) else twice


def _is_everywhere(lab: Lab, rows: Rows) -> bool:
    """Whether rows from all over the batch fail alone."""
    if len(rows) <= _SPREAD:
        return False
    picked = {rows[number * (len(rows) - 1) // (_SPREAD - 1)] for number in range(_SPREAD)}
    return all(_alone(lab, row) is not None for row in sorted(picked))


def _guilt(found: list[int], left: Rows, *, is_clean: bool) -> Finding:
    names = in_words(list(map(str, sorted(found))))
    said = f"row {names} of the batch goes" if len(found) == 1 else f"rows {names} of the batch go"
    said += " bad alone"
    if is_clean:
        said += f", and the other {len(left)} rows together are finite"
    elif left:
        said += "; there may be others"
    return Finding(
        "samples",
        "guilty",
        said,
        reproduces=True,
        vanishes=is_clean,
        rows=tuple(sorted(found)),
        removal=Change(rows=left) if left else None,
    )


def _innocence(lab: Lab, total: int) -> Finding | None:
    middle = (total + 1) // 2
    halves = tuple(range(middle)), tuple(range(middle, total))
    if not all(lab.is_finite(Change(rows=half)) for half in halves):
        return None
    said = "each half of the batch alone is finite: no single sample does it"
    return Finding("samples", "innocent", said)


def guilty_values(lab: Lab, row: int, donor: int) -> Finding | None:
    """Which value of a guilty row makes it bad; None if it is not a single one.

    Values are replaced by those of `donor`, a row that is not guilty.
    """
    others = [each for each in range(lab.replays.rows) if each != row]

    def heals(low: int, high: int) -> bool:
        # In the whole batch: some layers refuse a batch of one.
        return lab.is_finite(Change(rows=(row, *others), replaced=(low, high), donor=donor))

    low, high = 0, lab.replays.values
    if not 1 < high <= _MOST_VALUES or not heals(low, high):
        return None
    while high - low > 1:
        middle = (low + high + 1) // 2
        half = next((h for h in ((low, middle), (middle, high)) if heals(*h)), None)
        if half is None:
            return None
        low, high = half
    return Finding(
        "values",
        "guilty",
        f"with value {low} of row {row} taken from row {donor}, the batch is finite",
        reproduces=True,
        vanishes=True,
        rows=(row,),
    )


def _batch(lab: Lab) -> list[Finding]:
    """The guilty rows, and of a single one the guilty value."""
    found = guilty_rows(lab)
    if found is None:
        return []
    if len(found.rows) != 1 or not found.vanishes:
        return [found]
    donor = next(row for row in range(lab.replays.rows) if row not in found.rows)
    try:
        value = guilty_values(lab, found.rows[0], donor)
    except OutOfTimeError:
        value = None
    return [found] if value is None else [found, value]


def terms(lab: Lab) -> Finding | None:
    """Which terms of the loss go bad alone; None if it is no sum, or all or none do."""
    names = lab.replays.terms
    if len(names) < 2:
        return None
    bad = [name for number, name in enumerate(names) if lab.fails(Change(term=number))]
    good = [name for number, name in enumerate(names) if lab.is_finite(Change(term=number))]
    if not bad or not good:
        return None
    verb = "goes" if len(bad) == 1 else "go"
    said = f"of the terms of the loss, {' and '.join(bad)} {verb} bad alone"
    if len(bad) + len(good) == len(names):
        said += f", and {' and '.join(good)} alone {'is' if len(good) == 1 else 'are'} finite"
    return Finding("terms", "guilty", said, reproduces=True)


def weights(lab: Lab) -> Finding | None:
    """Whether the batch goes bad on earlier weights too."""
    for number in range(lab.replays.snapshots):
        change = Change(snapshot=number)
        if lab.is_finite(change):
            said = "with the weights of an earlier snapshot the same batch is finite"
            return Finding("weights", "depends", said, vanishes=True)
        if lab.fails(change) and number == lab.replays.snapshots - 1:
            said = "with earlier weights the same batch goes bad too: it is not the weights"
            return Finding("weights", "innocent", said)
    return None


_LESS = 0.1
_SMALLER = 1 / 16
_CLIP = 1.0


def dynamics(lab: Lab, *, steps: int) -> list[Finding]:
    """Whether the last steps, run again in gentler ways, end well: one finding for each way.

    Only if they end badly as they were.
    """
    if steps < 1 or not lab.fails(Change(steps=steps)):
        return []
    many = "the last step" if steps == 1 else f"the last {steps} steps"
    found = []
    for change, how in (
        (Change(steps=steps, learning_rate=_LESS), "a tenth of the learning rate"),
        (Change(steps=steps, clip=_CLIP), f"gradients clipped to a norm of {_CLIP:g}"),
        (Change(steps=steps, loss_scale=_SMALLER), "a sixteenth of the loss scale"),
    ):
        said = f"with {how} over {many}"
        finite, bad = f"{said} this one is finite", f"{said} it is still bad"
        found.append(_finding_without(lab, change, "dynamics", finite=finite, bad=bad))
    # That a single gentler step was not enough says nothing.
    return [each for each in found if each is not None and (steps > 1 or each.vanishes)]


_ROUNDS = 2  # with one, chance would be taken for proof once in thirty times
OUT_OF_TIME = "there was no time for more experiments"


def experiment(
    lab: Lab, diagnosis: Diagnosis, origin: Origin, *, steps: int = 0, is_diverging: bool = False
) -> list[Finding]:
    """What there was time to find out, in the order in which it was done.

    Nothing is tried on a step that does not go bad the same way twice.
    """
    found = _findings(lab, "repeat", repeat)
    if not found or found[-1].verdict != "deterministic":
        return found
    plan: list[tuple[str, Callable[[Lab], list[Finding] | Finding | None]]] = [
        ("guarded", guard_operation),
        ("samples", _batch),
        ("precision", precise),
        ("terms", terms),
        ("weights", weights),
        ("compiled", compare_compiled),
        ("dynamics", functools.partial(dynamics, steps=steps)),
    ]
    if is_diverging:
        del plan[2]  # in higher precision it only takes longer
    elif not cause_of(diagnosis.cause).due_to_history:
        del plan[-1]
    for name, act in plan:
        for each in _findings(lab, name, act):
            is_proof = each.removal is not None and _proves(each, diagnosis, origin, is_diverging)
            found.append(_confirm(lab, each) if is_proof else each)
        if found[-1].sentence == OUT_OF_TIME:
            break
    return found


def _findings(
    lab: Lab, name: str, act: Callable[[Lab], list[Finding] | Finding | None]
) -> list[Finding]:
    lab.doing = name
    try:
        found = act(lab)
    except OutOfTimeError:
        found = Finding(name, "inconclusive", OUT_OF_TIME)
    except CannotReplayError:
        found = None
    return found if isinstance(found, list) else [found] if found is not None else []


def _confirm(lab: Lab, finding: Finding) -> Finding:
    """A finding that proves must hold again: bad with the cause, finite without, every time."""
    try:
        for _ in range(_ROUNDS):
            before = lab.run(AS_IT_WAS)
            is_bad = lab.run(AS_IT_WAS, anew=True).is_like(before)
            if not is_bad or not lab.is_finite(finding.removal or AS_IT_WAS, anew=True):
                said = f"{finding.sentence}, though not every time"
                return dataclasses.replace(finding, vanishes=False, sentence=said)
    except (OutOfTimeError, CannotReplayError):
        return dataclasses.replace(finding, vanishes=False)
    return finding


def judge_findings(
    diagnosis: Diagnosis, origin: Origin, findings: Sequence[Finding], *, is_diverging: bool = False
) -> Diagnosis:
    """The diagnosis with the evidence, and as sure as the findings allow.

    Where training was running away before, an operation that overflows is no cause.
    """
    if not findings:
        return diagnosis
    said = [each.sentence for each in findings if each.sentence != OUT_OF_TIME]
    evidence = tuple(dict.fromkeys([*diagnosis.evidence, *(said or [OUT_OF_TIME])]))
    confidence = diagnosis.confidence
    if not any(each.experiment == "repeat" and each.reproduces for each in findings):
        confidence = "possible" if confidence == "possible" else "likely"
    elif any(_proves(each, diagnosis, origin, is_diverging) for each in findings):
        confidence = "proven"
    elif any(_refutes(each, diagnosis) for each in findings):
        confidence = "possible"
    return dataclasses.replace(diagnosis, evidence=evidence, confidence=confidence)


def _proves(finding: Finding, diagnosis: Diagnosis, origin: Origin, is_diverging: bool) -> bool:
    """Whether what was taken away is what the diagnosis names, and nothing else."""
    if not finding.is_proof or not origin.exact:
        return False
    if finding.experiment == "samples":
        return diagnosis.cause in ("bad_input_data", "bad_label") and origin.phase == "data"
    if finding.experiment == "guarded":
        return not is_diverging and is_seen_in_values(diagnosis.cause, origin)
    dtypes = {each.dtype for each in origin.outputs}
    is_low = bool(dtypes) and dtypes <= set(HALVES) and cause_of(diagnosis.cause).cured_by_float32
    return finding.experiment == "float32" and not is_diverging and is_low


def _refutes(finding: Finding, diagnosis: Diagnosis) -> bool:
    if finding.verdict != "innocent" or finding.experiment == "guarded":
        return finding.verdict == "innocent"
    return finding.experiment == "float32" and cause_of(diagnosis.cause).cured_by_float32


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
    if origin.facts.get("library"):  # what was changed is not the operation, but what it was given
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
    if later.rank != first.rank or not _bad_in(later) or _bad_in(later) != _bad_in(first):
        return later
    facts = {"noticed_step": later.step}
    facts |= {key: value for key, value in origin.facts.items() if key == "library"}
    place = dataclasses.replace(origin, inputs=(), outputs=(), lineage=(), facts=facts, exact=False)
    same = Diagnosis(
        cause=diagnosis.cause,
        why=f"This step was not traced. The same values went bad as at step {known.step}, so it is "
        "taken to be the same.",
        fix=diagnosis.fix,
        confidence="possible",
    )
    return dataclasses.replace(later, origin=place, diagnosis=same)


def _bad_in(incident: Incident) -> set[tuple[str, NaNType]]:
    # The inputs of a model are looked at in traced steps only.
    bad = (each for each in incident.reports if each.has_nan)
    return {
        (each.location, each.nan_type) for each in bad if not each.location.startswith("inputs.")
    }
