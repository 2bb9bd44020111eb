"""What a run comes to: the last line, the remarks before it, and whether a recovery was one."""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from stayfinite.records import Aftermath, Incident, ReadValue, RunResult
from stayfinite.runner.plan import ProcessRecord, is_running, was_stopped
from stayfinite.runner.script import INCIDENT_CODE, Ending
from stayfinite.text import LOCATIONS, count, noticed, seen_kind, what_was_done

_MOST = 3  # lines of the script, or processes, that are named


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`remarks` are clauses; `failure` says why a recovery failed, `recovered` that it did not."""

    remarks: tuple[str, ...] = ()
    failure: str | None = None
    recovered: bool | None = None

    def of(self, result: RunResult) -> RunResult:
        """The result with what is said here."""
        sentences = tuple(f"{text[0].upper()}{text[1:]}." for text in self.remarks)
        return dataclasses.replace(result, remarks=sentences, recovered=self.recovered)


def judge(
    records: list[ProcessRecord],
    result: RunResult,
    *,
    recovers: bool,
    deaths: Mapping[int, str] | None = None,
    speaker: int = 0,
    is_last: bool = True,
) -> Verdict:
    """What all processes saw, taken together.

    `deaths` are processes that a signal ended, `speaker` is the one that reports, and it `is_last`
    unless a launcher started others beside it.
    """
    remarks = (
        *_in_evaluation(records, is_finite=not result.incidents),
        *_at_the_end(records, is_finite=not result.incidents),
        *_unheard(records, deaths or {}, speaker=speaker, is_last=is_last),
    )
    if not (recovers and result.incidents):
        return Verdict(remarks=remarks)
    failure = next(filter(None, map(why_failed, records)), None)
    remarks = tuple(remark for remark in remarks if remark != failure)
    return Verdict(remarks=remarks, failure=failure, recovered=failure is None)


def why_failed(record: ProcessRecord) -> str | None:
    """Why recovering this process did not help it; None if it did, or nothing was bad."""
    after = record.aftermath
    if not record.result.incidents:
        return None
    bad, updates = after.bad_updates, after.updates
    if updates and bad >= updates:
        return "no step was good"
    if 2 * bad > updates:
        return f"only {_share(updates - bad, updates)} were good"
    if after.bad_at_end:
        return _left_bad(after.bad_at_end)
    last = record.result.steps
    losses = [v for v in after.read if _is_result(v, after) and v.step >= last]
    if losses:
        return f"the loss in evaluation is {losses[0].nan_type.word} at the end ({_at(losses[0])})"
    warned = any(i.outcome and i.outcome.strategy == "warn" for i in record.result.incidents)
    if after.is_last_loss_bad and warned:
        return "the last loss is not finite"
    return None


def last_line(
    records: list[ProcessRecord], result: RunResult, verdict: Verdict, ending: Ending, on_nan: str
) -> str:
    """The one line that the run ends with."""
    if not result.incidents:
        how = f"the script ended with exit code {ending.code}; " if ending.code else ""
        how = "interrupted; " if ending.interrupted else how
        return how + _what_was_checked(records, result, verdict)
    first = result.incidents[0]
    if all(is_left_out(each) for each in result.incidents):
        how = f"the script ended with exit code {ending.code}; " if ending.code else ""
        losses = f"{count(len(result.incidents), 'loss')} not finite"
        steps = count(result.steps, "step")
        return f"{how}{steps} checked; {losses}, skipped by the script itself."
    if on_nan == "stop":
        if any(record.stopped for record in records) and not was_stopped(records):
            again = f"its launcher started it again, and it ended with exit code {ending.code}"
            return f"the script was stopped at step {first.step}; {again}."
        if ending.code != INCIDENT_CODE:
            what = f"{seen_kind(first)} in {noticed(first)}"
            return f"the script ended itself with exit code {ending.code}; the cause was {what}."
        if first.outcome is not None and first.outcome.strategy == "none":
            return f"the script had ended when step {first.step} was found to be bad; exit code 3."
        # A traced incident has the step in which the value was made.
        facts = first.origin.facts if first.origin is not None else {}
        step = facts.get("noticed_step", first.step)
        return f"the script was stopped at step {step}; exit code 3."
    # Incidents are one for each bad step; of very many, only the first are kept.
    found = len(result.incidents)
    # The step that ended the run has not been counted yet.
    steps = count(max([result.steps, *(each.step + 1 for each in result.incidents)]), "step")
    bad = max((record.aftermath.bad_updates for record in records), default=0)
    many = f"{count(found, 'incident')} in {steps}"
    if bad > found:
        many = f"{bad} of {steps} were bad, the first {found} are reported"
    if on_nan == "warn":
        return f"{many}; the script went on (--on-nan warn)."
    return f"{many}; {_how_recovered(records, result, verdict, ending)}"


def is_left_out(incident: Incident) -> bool:
    """Whether the script itself did not train on a bad loss, and went on."""
    return incident.outcome is not None and incident.outcome.strategy == "script"


def _how_recovered(
    records: list[ProcessRecord], result: RunResult, verdict: Verdict, ending: Ending
) -> str:
    done = Counter(i.outcome.strategy for i in result.incidents if i.outcome)
    done.pop("none", None)
    by_strategy = ", ".join(f"{strategy} {times}" for strategy, times in done.items())
    if was_stopped(records):
        return f"gave up: {what_was_done(result.incidents[-1])}; exit code 3."
    if verdict.failure is not None:
        failed = "nothing was recovered" if set(done) <= {"warn"} else "recovery failed"
        by = f" ({by_strategy})" if by_strategy else ""
        return f"{failed}: {verdict.failure}{by}; exit code {ending.code}."
    if not done:  # it was too late for that
        detail = next((i.outcome.detail for i in result.incidents if i.outcome), "")
        return f"nothing was recovered: {detail or 'no update came that could be skipped'}."
    if set(done) <= {"warn"}:
        return "nothing was recovered, because no torch optimizer makes these updates."
    after = [record.aftermath for record in records if record.result.incidents]
    worst = max(after, key=lambda each: each.bad_updates / max(1, each.updates))
    share = _share(worst.updates - worst.bad_updates, worst.updates)
    losses = ""
    if worst.loss_before is not None and worst.loss_after is not None:
        before, last = f"{worst.loss_before:.4g}", f"{worst.loss_after:.4g}"
        losses = f", loss {before} before the first bad one, {last} at the end"
    return f"training went on: {share} were good{losses} ({by_strategy})."


def _what_was_checked(records: list[ProcessRecord], result: RunResult, verdict: Verdict) -> str:
    but = "".join(f"; {remark}" for remark in verdict.remarks)
    if not any(record.saw_torch for record in records):
        return f"the script did not import torch, so nothing was checked{but}."
    if not result.steps and any(record.has_begun for record in records):
        return f"training started, but its process did not report back{but}."
    if not result.steps:
        return f"no backward pass and no optimizer step was seen, so nothing was checked{but}."
    skipped = result.skipped_by_scaler
    scaler = f" ({count(skipped, 'update')} skipped by the loss scaler)" if skipped else ""
    # What a process has done since it last wrote is not known of one that was killed.
    heard = max((each.result.steps for each in records if each.ended is not None), default=0)
    least = "at least " if but and heard < result.steps else ""
    checked = f"{least}{count(result.steps, 'step')} checked"
    if but:
        return f"{checked} and finite{scaler}, but{but[1:]}."
    return f"{checked}, all finite{scaler}."


def _in_evaluation(records: list[ProcessRecord], *, is_finite: bool) -> list[str]:
    """Values that the script read; those of training only where no incident tells of them."""
    said: dict[str, None] = {}
    for value in (value for record in records for value in record.aftermath.read):
        if value.in_evaluation or is_finite:
            what = "a loss" if value.is_loss else "a value"
            where = "in evaluation " if value.in_evaluation else "in the script "
            times = "" if value.times == 1 else f" {value.times} times"
            last = f"the last time after {count(value.step, 'step')}"
            said[f"{where}{what} was {value.nan_type.word}{times}, {last} ({_at(value)})"] = None
    more = len(said) - _MOST
    return [*list(said)[:_MOST], *([f"{count(more, 'more line')} like it"] if more > 0 else [])]


def _at(value: ReadValue) -> str:
    return f"{value.file}:{value.line}"


def _at_the_end(records: list[ProcessRecord], *, is_finite: bool) -> list[str]:
    said = []
    for record in records:
        after = record.aftermath
        if after.bad_at_end:
            said.append(_left_bad(after.bad_at_end))
        if after.unseen is not None:
            said.append(f"the weights could not be looked at in the end ({after.unseen})")
        if after.has_failed:
            said.append("stayfinite failed inside a step, so not every step was checked")
        if after.is_last_loss_bad and is_finite:
            said.append("the last loss is not finite")
    return list(dict.fromkeys(said))[:_MOST]


def _unheard(
    records: list[ProcessRecord], deaths: Mapping[int, str], *, speaker: int, is_last: bool
) -> list[str]:
    """Processes that trained and are not known to have ended well."""
    if was_stopped(records):
        return []  # we ended them
    ranks = {r.pid: f" (rank {r.rank})" for r in records if r.rank or r.in_group}
    said = {
        pid: f"process {pid}{ranks.get(pid, '')} was killed by {name}"
        for pid, name in deaths.items()
    }
    for record in records:
        how = _how_gone(record, is_last=is_last) if record.has_begun else None
        if how is not None and record.pid != speaker and record.pid not in said:
            said[record.pid] = f"process {record.pid}{ranks.get(record.pid, '')} {how}"
    has_failed = any(record.pid == speaker and record.ended for record in records)
    if not said and has_failed and not is_last:
        return ["the state of the other ranks is unknown"]
    more = len(said) - _MOST
    return [*list(said.values())[:_MOST], *([f"{more} more of them, too"] if more > 0 else [])]


def _how_gone(record: ProcessRecord, *, is_last: bool) -> str | None:
    """What is wrong with the end of a process; nothing if a rank beside this one goes on."""
    if record.ended is not None:
        return f"ended with exit code {record.ended}" if record.ended else None
    if is_running(record):
        return "was still running" if is_last else None
    return "ended without reporting"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _left_bad(names: tuple[str, ...]) -> str:
    kind, _, name = names[0].partition(".")
    first = f"{LOCATIONS[kind]} {name}" if kind in LOCATIONS else names[0]
    if len(names) == 1:
        return f"at the end {first} is not finite"
    return f"at the end {first} and {count(len(names) - 1, 'more tensor')} are not finite"


def _is_result(value: ReadValue, after: Aftermath) -> bool:
    """Whether it is a loss that the script evaluated, and not one that was left out of training."""
    is_training = not value.is_certain and after.is_last_loss_bad
    return value.in_evaluation and value.is_loss and not is_training


def _share(part: int, whole: int) -> str:
    percent = 100 * part / max(1, whole)
    digits = 0 if percent < 99 or part == whole else 1
    return f"{part} of {count(whole, 'step')} ({percent:.{digits}f}%)"
