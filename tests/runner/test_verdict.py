"""What the last line says, from the records of all processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from typing import Any

import pytest

from stayfinite.records import (
    Aftermath,
    Incident,
    NaNReport,
    NaNType,
    Origin,
    Outcome,
    ReadValue,
    RunResult,
    to_data,
)
from stayfinite.runner import plan
from stayfinite.runner.plan import ProcessRecord
from stayfinite.runner.script import Ending
from stayfinite.runner.verdict import Verdict, judge, last_line


def incidents(count: int, strategy: str = "skip") -> tuple[Incident, ...]:
    return tuple(Incident(step=i, outcome=Outcome(strategy=strategy)) for i in range(count))


def record(bad: int = 0, steps: int = 60, *, pid: int = 1, **facts: Any) -> ProcessRecord:
    strategy = facts.pop("strategy", "skip")
    after = {name: facts.pop(name) for name in list(facts) if name in Aftermath.__annotations__}
    after = {"updates": steps, "bad_updates": bad, **after}
    result = RunResult(incidents=incidents(bad, strategy), steps=steps)
    known = {"saw_torch": True, "has_begun": True, "ended": 0, **facts}
    return ProcessRecord(pid=pid, result=result, aftermath=Aftermath(**after), **known)


def said(*records: ProcessRecord, on_nan: str = "recover", **how: Any) -> str:
    result = plan.merged_result(list(records), only_first=on_nan == "stop")
    verdict = judge(list(records), result, recovers=on_nan == "recover", speaker=1, **how)
    code = 3 if verdict.failure or (on_nan == "stop" and result.incidents) else 0
    return last_line(list(records), result, verdict, Ending(code=code), on_nan)


def read(**facts: Any) -> ReadValue:
    known = {"nan_type": NaNType.NAN, "file": "train.py", "line": 9, "step": 60, **facts}
    return ReadValue(**known)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"bad": 3, "loss_before": 3.2781, "loss_after": 0.206}, "3 incidents in 60 steps; "
         "training went on: 57 of 60 steps (95%) were good, loss 3.278 before the first bad one, "
         "0.206 at the end (skip 3)."),
        ({"bad": 30}, "30 incidents in 60 steps; training went on: 30 of 60 steps (50%) were good "
         "(skip 30)."),
        ({"bad": 31}, "31 incidents in 60 steps; recovery failed: only 29 of 60 steps (48%) were "
         "good (skip 31); exit code 3."),
        ({"bad": 2, "steps": 2}, "2 incidents in 2 steps; recovery failed: no step was good "
         "(skip 2); exit code 3."),
        ({"bad": 1, "steps": 1}, "1 incident in 1 step; recovery failed: no step was good "
         "(skip 1); exit code 3."),
        ({"bad": 1, "bad_at_end": ("parameters.fc.weight",)}, "1 incident in 60 steps; recovery "
         "failed: at the end parameter fc.weight is not finite (skip 1); exit code 3."),
        ({"bad": 1, "strategy": "warn"}, "1 incident in 60 steps; nothing was recovered, because "
         "no torch optimizer makes these updates."),
        ({"bad": 1, "strategy": "warn", "is_last_loss_bad": True}, "1 incident in 60 steps; "
         "nothing was recovered: the last loss is not finite (warn 1); exit code 3."),
        ({"bad": 1, "is_last_loss_bad": True}, "1 incident in 60 steps; training went on: 59 of 60 "
         "steps (98%) were good (skip 1)."),
    ],
)  # fmt: skip
def test_a_recovery_has_a_result(facts: dict[str, Any], line: str) -> None:
    assert said(record(**facts)) == line


@pytest.mark.parametrize(
    ("value", "is_last_loss_bad", "fails"),
    [
        (read(is_loss=True), False, True),
        (read(is_loss=True), True, True),
        (read(is_loss=True, is_certain=False), False, True),
        (read(is_loss=True, is_certain=False), True, False),  # it may be the step left out
        (read(is_loss=True, step=40), False, False),  # and finite again since
        (read(is_loss=False), False, False),  # a metric may be 0/0
        (read(is_loss=True, in_evaluation=False), False, False),
    ],
)
def test_a_recovery_fails_when_the_loss_in_evaluation_is_bad_at_the_end(
    value: ReadValue, is_last_loss_bad: bool, fails: bool
) -> None:
    line = said(record(bad=1, read=(value,), is_last_loss_bad=is_last_loss_bad))
    reason = "recovery failed: the loss in evaluation is NaN at the end (train.py:9)"
    assert (reason in line) == fails
    assert ("training went on" in line) == (not fails)


@pytest.mark.parametrize(
    ("facts", "remark"),
    [
        ({"read": (read(times=4),)}, "in evaluation a value was NaN 4 times, the last time after "
         "60 steps (train.py:9)"),
        ({"read": (read(nan_type=NaNType.POS_INF, is_loss=True),)}, "in evaluation a loss was Inf, "
         "the last time after 60 steps (train.py:9)"),
        ({"read": (read(in_evaluation=False),)}, "in the script a value was NaN, the last time "
         "after 60 steps (train.py:9)"),
        ({"has_failed": True}, "stayfinite failed inside a step, "
         "so not every step was checked"),
        ({"bad_at_end": ("ema.weight", "ema.bias")}, "at the end ema.weight and 1 more tensor are "
         "not finite"),
        ({"is_last_loss_bad": True}, "the last loss is not finite"),
        ({"unseen": "RuntimeError: no"}, "the weights could not be looked at in the end "
         "(RuntimeError: no)"),
    ],
)  # fmt: skip
def test_all_finite_is_not_said_of_what_was_seen_bad(facts: dict[str, Any], remark: str) -> None:
    for on_nan in ("stop", "warn", "recover"):
        assert said(record(**facts), on_nan=on_nan) == f"60 steps checked and finite, but {remark}."


def gone() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_all_finite_is_not_said_when_a_process_was_not_heard_to_its_end() -> None:
    pid = gone()
    well = record()
    lost = record(pid=pid, born="1", ended=None, rank=1, steps=0)
    line = said(well, lost)
    assert (
        line == f"60 steps checked and finite, but process {pid} (rank 1) ended without reporting."
    )
    failed = record(pid=pid, ended=1)
    assert said(well, failed).endswith(f"but process {pid} ended with exit code 1.")
    assert said(well, deaths={7: "SIGKILL"}).endswith("but process 7 was killed by SIGKILL.")
    assert said(lost).startswith("training started, but its process did not report back; process")


def test_a_signal_that_ended_a_rank_is_named() -> None:
    pids = [gone(), gone()]
    lost = [record(pid=p, born="1", ended=None, rank=n, in_group=True) for n, p in enumerate(pids)]
    assert said(record(steps=0), *lost, deaths={pids[1]: "SIGKILL"}) == (
        "at least 60 steps checked and finite, but "
        f"process {pids[1]} (rank 1) was killed by SIGKILL; "
        f"process {pids[0]} (rank 0) ended without reporting."
    )


def test_a_rank_that_failed_does_not_speak_well_of_the_others() -> None:
    """They may be on another machine, and have failed first."""
    assert said(record(ended=1), is_last=False) == (
        "60 steps checked and finite, but the state of the other ranks is unknown."
    )
    failed = record(pid=2, rank=1, ended=1)
    assert said(record(ended=1), failed, is_last=False).endswith(
        "but process 2 (rank 1) ended with exit code 1."
    )


def test_a_stop_is_not_the_end_of_a_run_that_was_started_again() -> None:
    stopped = record(bad=1, steps=5, strategy="stop", stopped=True, ended=3)
    again = record(pid=2, attempt=1)
    assert plan.was_stopped([stopped])
    assert not plan.was_stopped([stopped, again])
    result = plan.merged_result([stopped, again], only_first=True)
    verdict = judge([stopped, again], result, recovers=False)
    assert last_line([stopped, again], result, verdict, Ending(code=0), "stop") == (
        "the script was stopped at step 0; its launcher started it again, "
        "and it ended with exit code 0."
    )
    stopped_again = record(pid=3, attempt=1, stopped=True)
    assert plan.was_stopped([stopped, again, stopped_again])


def test_a_rank_that_still_runs_beside_this_one_is_no_remark() -> None:
    beside = record(pid=os.getpid(), born=plan.birth_of_process(os.getpid()) or "", ended=None)
    assert said(record(), beside).endswith(f"but process {os.getpid()} was still running.")
    assert said(record(), beside, is_last=False) == "60 steps checked, all finite."


def test_a_worker_that_never_trained_is_no_remark() -> None:
    asked_to_end = record(pid=gone(), born="1", ended=None, has_begun=False, steps=0)
    assert said(record(), asked_to_end) == "60 steps checked, all finite."


def test_more_bad_steps_than_incidents_are_counted() -> None:
    many = record(bad=50, steps=105, strategy="warn", bad_updates=95)
    told = (
        "95 of 105 steps were bad, the first 50 are reported; the script went on (--on-nan warn)."
    )
    assert said(many, on_nan="warn") == told


def test_the_step_at_which_the_script_was_stopped_is_the_one_that_noticed() -> None:
    origin = Origin(phase="forward", file="train.py", line=7, facts={"noticed_step": 12})
    one = record(bad=1, strategy="stop")
    bad = dataclasses.replace(one.result.incidents[0], origin=origin)
    one = dataclasses.replace(one, result=RunResult(incidents=(bad,), steps=13))
    assert said(one, on_nan="stop") == "the script was stopped at step 12; exit code 3."


def test_what_ended_a_script_that_ended_itself_is_said_as_it_was_seen() -> None:
    seen = NaNReport(has_nan=True, nan_type=NaNType.NEG_INF, location="loss", tensor_shape=())
    result = RunResult(incidents=(Incident(step=4, reports=(seen,)),), steps=4)
    one = ProcessRecord(pid=1, result=result, aftermath=Aftermath())
    line = last_line([one], result, Verdict(), Ending(code=1), "stop")
    assert line == "the script ended itself with exit code 1; the cause was -Inf in the loss."


def test_what_was_found_after_the_end_did_not_end_the_script() -> None:
    late = record(bad=1, strategy="none")
    line = "the script had ended when step 0 was found to be bad; exit code 3."
    assert said(late, on_nan="stop") == line


def test_json_has_remarks_and_result_only_where_there_are_any() -> None:
    assert set(to_data(RunResult())) == {
        "schema", "incidents", "skipped_by_scaler", "steps", "exit"
    }  # fmt: skip
    records = [record(bad=1, read=(read(),))]
    result = plan.merged_result(records, only_first=False)
    result = judge(records, result, recovers=True).of(result)
    assert result.recovered
    (remark,) = to_data(result)["remarks"]
    assert remark == "In evaluation a value was NaN, the last time after 60 steps (train.py:9)."


def test_a_script_that_ended_itself_is_not_said_to_have_no_optimizer() -> None:
    crashed = record(bad=1, strategy="none")
    assert "no torch optimizer" not in said(crashed)
    assert said(crashed).startswith("1 incident in 60 steps; nothing was recovered: ")
