"""Records of several processes become one result."""

from __future__ import annotations

import os
import subprocess

from stayfinite.records import Incident, Origin, RunResult
from stayfinite.runner import plan
from stayfinite.runner.plan import Effect, ProcessRecord


def incident(step, *, rank=0, time=0.0, phase="forward"):
    return Incident(step=step, rank=rank, time=time, origin=Origin(phase=phase))


def record(pid, *incidents, steps=0, skipped=0, **facts):
    result = RunResult(incidents=incidents, steps=steps, skipped_by_scaler=skipped)
    return ProcessRecord(pid=pid, result=result, **facts)


def test_record_comes_back_from_disk(tmp_path):
    written = record(
        7,
        incident(3, rank=1),
        rank=1,
        stopped=True,
        effects=(Effect(words="wrote x", path="/x"),),
        seconds=2,
    )
    plan.save_record(written, str(tmp_path))
    assert plan.load_records(str(tmp_path)) == [written]


def test_torn_or_foreign_files_are_passed_over(tmp_path):
    (tmp_path / "process-1.json").write_text("{")
    (tmp_path / "process-2.json").write_text('{"pid": "x"}')
    assert plan.load_records(str(tmp_path)) == []


def test_rank_that_only_received_the_value_is_not_where_it_began():
    received = record(1, incident(6, time=1.0, phase="distributed"))
    local = record(2, incident(6, rank=1, time=2.0))
    assert plan.first_incident([received, local])[0].pid == 2


def test_earlier_step_wins_and_then_earlier_time():
    late, early = incident(7, rank=0, time=1.0), incident(6, rank=1, time=2.0)
    assert plan.first_incident([record(1, late), record(2, early)])[1] == early
    first, second = incident(6, rank=1, time=1.0), incident(6, rank=2, time=2.0)
    assert plan.first_incident([record(1, second), record(2, first)])[1] == first


def test_one_incident_per_step_remains():
    one = record(1, incident(3, time=2.0), incident(5, time=3.0), steps=9, skipped=2)
    two = record(2, incident(3, rank=1, time=1.0), steps=10)
    merged = plan.merged_result([one, two], only_first=False)
    assert [(i.step, i.rank) for i in merged.incidents] == [(3, 1), (5, 0)]
    assert (merged.steps, merged.skipped_by_scaler) == (10, 2)


def test_a_stopped_run_has_one_incident():
    records = [record(1, incident(7)), record(2, incident(6, rank=1))]
    assert [i.rank for i in plan.merged_result(records, only_first=True).incidents] == [1]


def test_nothing_reported_is_a_healthy_result():
    assert plan.merged_result([], only_first=True) == RunResult()
    assert plan.first_incident([]) is None


def test_process_is_told_from_a_later_one_with_its_number():
    born = plan.birth_of_process(os.getpid())
    assert plan.is_running(record(os.getpid(), born=born))
    assert not plan.is_running(record(os.getpid(), born="another"))
    child = subprocess.Popen(["true"])
    assert child.wait() == 0
    assert not plan.is_running(record(child.pid, born="1"))
