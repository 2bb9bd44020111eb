"""When a script is run a second time, and what the two runs say together."""

from __future__ import annotations

import dataclasses
import time

import pytest

from stayfinite.explain.experiments import Budget
from stayfinite.records import Diagnosis, Incident, Origin, Outcome, RunResult
from stayfinite.runner import second_run
from stayfinite.runner.case import Case, OtherRun, why_not_again
from stayfinite.runner.options import RunOptions, Scene
from stayfinite.runner.plan import Effect, Plan, ProcessRecord
from stayfinite.runner.script import Target
from stayfinite.runner.second_run import confirmed, is_foreign, is_same, unconfirmed
from stayfinite.settings import ROUND, GuardSettings

WROTE = Effect(words="wrote /x", path="/x")
SENT = Effect(words="sent data to far")
INEXACT = Incident(step=3, origin=Origin(phase="forward"), outcome=Outcome(strategy="stop"))
EXACT = Incident(
    step=3,
    origin=Origin(phase="forward", line=9, exact=True),
    diagnosis=Diagnosis(cause="log_of_zero", why="w", fix="f", confidence="likely"),
)


def scene(folder, *, seconds_ago=10.0, **options):
    work = folder / "work"
    work.mkdir(exist_ok=True)
    started = time.time() - seconds_ago
    plan = Plan(folder=str(folder), guard=GuardSettings(folder=str(work)), started=started)
    target = Target(name="train.py", args=("--lr", "a b"))
    return Scene(target=target, options=RunOptions(**options), plan=plan, cwd=str(work))


def case(scene, *records):
    incidents = tuple(i for record in records for i in record.result.incidents)
    result = RunResult(incidents=incidents)
    return Case(scene=scene, records=list(records), result=result, budget=Budget(0.0))


def record(incident=INEXACT, *, seconds=2.0, **facts):
    result = RunResult(incidents=(incident,))
    return ProcessRecord(pid=1, result=result, seconds=seconds, arm_at=40, **facts)


@pytest.mark.parametrize(
    ("rank", "earlier", "expected"),
    [(0, 0, True), (0, ROUND, True), (0, ROUND + 1, False), (0, -1, False), (1, 0, False)],
)
def test_same_incident_is_of_one_rank_and_noticed_in_one_round(rank, earlier, expected):
    first = Incident(step=100)
    assert is_same(first, Incident(step=100 - earlier, rank=rank)) is expected


@pytest.mark.parametrize(
    ("options", "effects", "seconds_ago", "reason"),
    [
        ({}, (), 10, None),
        ({}, (WROTE,), 10, None),
        ({}, (WROTE, SENT), 10, "because the script sent data to far."),
        ({}, (), 301, "because the first took 5 minutes."),
        ({"second_run": "never"}, (), 10, "(--second-run never)."),
        ({"second_run": "always"}, (WROTE, SENT), 900, None),
    ],
)
def test_second_run_is_decided(tmp_path, options, effects, seconds_ago, reason):
    asked = scene(tmp_path, seconds_ago=seconds_ago, **options)
    found = why_not_again(case(asked, record(effects=effects)))
    assert found is None if reason is None else found.endswith(reason)


@pytest.mark.parametrize(
    ("options", "effects", "kinds"),
    [
        ({}, (), ("overlay", "landlock", "audit")),
        ({}, (WROTE,), ("overlay",)),
        ({"second_run": "always"}, (WROTE,), ("overlay", "landlock", "audit")),
    ],
)
def test_what_has_written_files_is_run_again_in_a_view_of_them(tmp_path, options, effects, kinds):
    records = [record(effects=effects, made=("/new", "/a")), record(made=("/a", "/b"))]
    plan = case(scene(tmp_path, **options), *records).plan_for("second", "again")
    assert (plan.sandboxes, plan.hidden) == (kinds, ("/new", "/a", "/b"))


def test_where_there_is_no_view_written_files_forbid_a_second_run(tmp_path, monkeypatch):
    monkeypatch.setenv("STAYFINITE_SANDBOX", "landlock")
    asked = case(scene(tmp_path), record(effects=(WROTE,)))
    (note,) = (after := second_run.look_again(asked)).notes
    assert after.result == asked.result
    assert note.startswith("There was no second run, because the script wrote /x.")
    assert note.endswith("stayfinite run --trace train.py --lr 'a b'")


def test_refusal_names_the_command(tmp_path):
    asked = case(scene(tmp_path, second_run="never"), record())
    (note,) = (after := second_run.look_again(asked)).notes
    assert after.result == asked.result
    assert note.endswith("stayfinite run --second-run always train.py --lr 'a b'")


@pytest.mark.parametrize("options", [{}, {"trace": True}])
def test_exact_origin_needs_no_second_run(tmp_path, monkeypatch, options):
    monkeypatch.setattr(second_run, "run_again", pytest.fail)
    asked = case(scene(tmp_path, **options), record(INEXACT if options else EXACT))
    assert second_run.look_again(asked) == asked


def look(tmp_path, monkeypatch, *answers, seconds=2.0):
    plans, left = [], list(answers)

    def run_again(scene, plan, *, seconds):
        plans.append(plan.guard)
        return left.pop(0)

    monkeypatch.setattr(second_run, "run_again", run_again)
    after = second_run.look_again(case(scene(tmp_path), record(seconds=seconds)))
    return after.result.incidents[0], list(after.notes), plans


def test_same_step_gives_the_exact_origin_and_keeps_the_outcome(tmp_path, monkeypatch):
    incident, notes, plans = look(tmp_path, monkeypatch, OtherRun(incident=EXACT))
    assert incident.origin == EXACT.origin
    assert dataclasses.replace(incident.diagnosis, evidence=()) == EXACT.diagnosis
    assert incident.diagnosis.evidence[-1].startswith("Deterministic: a second run")
    assert incident.outcome == INEXACT.outcome
    assert notes == []
    assert [plan.trace for plan in plans] == ["start"]


def test_tracer_may_notice_one_step_earlier(tmp_path, monkeypatch):
    earlier = dataclasses.replace(EXACT, step=2)
    incident, _, _ = look(tmp_path, monkeypatch, OtherRun(incident=earlier))
    assert (incident.step, incident.origin) == (2, EXACT.origin)


def test_late_incident_is_traced_from_shortly_before(tmp_path, monkeypatch):
    _, _, (plan,) = look(tmp_path, monkeypatch, OtherRun(incident=EXACT), seconds=26.0)
    assert (plan.trace, plan.arm_at, plan.on_nan) == ("armed", 40, "stop")


@pytest.mark.parametrize(
    ("seconds", "traces"), [(24.9, ["start"]), (24.99, ["start"]), (200.0, ["armed"])]
)
def test_foreign_value_is_looked_for_from_the_start_if_time_allows(
    tmp_path, monkeypatch, seconds, traces
):
    foreign = Incident(step=3, origin=Origin(phase="data", facts={"foreign": True}))
    answers = [OtherRun(incident=foreign), OtherRun(incident=EXACT)]
    _, _, plans = look(tmp_path, monkeypatch, *answers, seconds=seconds)
    assert [plan.trace for plan in plans] == traces


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (OtherRun(), "stayed finite"),
        (OtherRun(incident=Incident(step=4)), "went bad elsewhere (step 4: "),
        (OtherRun(incident=Incident(step=5, rank=2)), "went bad elsewhere (step 5, rank 2: "),
    ],
)
def test_other_behaviour_is_called_not_deterministic(tmp_path, monkeypatch, again, words):
    incident, _, _ = look(tmp_path, monkeypatch, again)
    assert incident.origin == INEXACT.origin
    (evidence,) = incident.diagnosis.evidence
    assert evidence.startswith("Not deterministic: ")
    assert words in evidence


def test_failed_second_run_shows_its_last_lines(tmp_path, monkeypatch):
    again = OtherRun(problem="The second run failed:", tail=("  MemoryError",))
    incident, notes, _ = look(tmp_path, monkeypatch, again)
    assert incident == INEXACT
    assert notes == ["The second run failed:", "  MemoryError"]


def test_doubt_lowers_the_confidence_of_a_diagnosis():
    assert unconfirmed(EXACT, None).diagnosis.confidence == "possible"
    assert unconfirmed(EXACT, None).diagnosis.cause == "log_of_zero"


def test_confirmation_never_loses_what_was_known():
    assert confirmed(EXACT, Incident(step=3)).origin == EXACT.origin


def test_confirmation_still_names_the_buffer():
    why = "Buffer weight of Scaler is not finite."
    buffer = Diagnosis(cause="bad_buffer", why=why, fix="")
    both = confirmed(dataclasses.replace(EXACT, diagnosis=buffer), EXACT)
    assert both.diagnosis.cause == EXACT.diagnosis.cause
    assert why in both.diagnosis.evidence


def test_origin_outside_the_traced_part_is_foreign():
    assert is_foreign(Incident(step=1))
    assert not is_foreign(None)
    assert not is_foreign(EXACT)


def test_no_advice_is_given_for_what_was_seen(tmp_path):
    seen = dataclasses.replace(
        EXACT, step=2, origin=dataclasses.replace(EXACT.origin, file="train.py")
    )
    asked = case(scene(tmp_path, second_run="never"), record(seen))
    assert second_run.look_again(asked) == asked
