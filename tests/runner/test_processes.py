"""Training in several processes: one report, on the rank where it began."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stayfinite.records import Incident, RunResult
from stayfinite.runner import plan, processes
from stayfinite.runner.plan import ProcessRecord
from stayfinite.runner.watcher import Watch
from stayfinite.settings import GuardSettings

GROUP = """
    import os, sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp

    def train(rank, method):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            loss = model(torch.ones(3, 2)).pow(2).mean()
            if rank == 1 and step == 2:
                loss = loss * torch.log(loss.detach() * 0 - 1)
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
        print("not reached by a waiting rank")

    def worker(rank, method, path):
        dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
        train(rank, method)

    if __name__ == "__main__":
        method = sys.argv[1]
        if method == "torchrun":
            dist.init_process_group("gloo")
            train(dist.get_rank(), method)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "meeting")
            if method == "mp.spawn":
                mp.spawn(worker, (method, path), nprocs=2)
            else:
                context = mp.get_context(method)
                children = [
                    context.Process(target=worker, args=(rank, method, path)) for rank in range(2)
                ]
                for child in children: child.start()
                for child in children: child.join()
                print(sorted(child.exitcode for child in children))
"""
LINE = 10


def test_forked_ranks_are_stopped_together_and_traced_again(scripts):
    scripts.write(GROUP)
    options = ["--json", "out.json", "--again", "never"]
    done = scripts.warm("train.py", "fork", options=options)
    assert (done.code, done.out) == (3, b"[-15, 3]\n"), done.err.decode()
    assert b"Traceback" not in done.err
    assert done.ours[0].startswith("step 2, rank 1: loss is NaN")
    assert done.ours[0].endswith("ending the run.")
    assert done.ours[1].startswith("running the script again")
    assert done.ours[2] == "the script was stopped at step 2; exit code 3."
    (incident,) = scripts.result()["incidents"]
    assert (incident["step"], incident["rank"]) == (2, 1)
    assert (incident["origin"]["exact"], incident["origin"]["line"]) == (True, LINE)


def test_spawned_ranks_end_without_the_words_of_the_machinery(scripts):
    scripts.write(GROUP)
    options = ["--json", "out.json", "--second-run", "never"]
    done = scripts.warm("train.py", "mp.spawn", options=options)
    assert (done.code, done.out) == (3, b""), done.err.decode()
    assert b"Traceback" not in done.err
    assert b"ProcessRaisedException" not in done.err
    assert scripts.result()["incidents"][0]["rank"] == 1


def test_ranks_of_torchrun_are_watched(scripts):
    scripts.write(GROUP)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "torchrun"]
    options = ["--json", "out.json", "--second-run", "never"]
    done = scripts.warm(*words, options=options)
    assert (done.code, done.out) == (3, b""), done.err.decode()
    assert b"ChildFailedError" not in done.err
    assert done.ours[-1] == "the script was stopped at step 2; exit code 3."
    (incident,) = scripts.result()["incidents"]
    assert (incident["rank"], incident["origin"] and incident["origin"]["file"]) in [
        (1, "train.py"),
        (1, None),
    ]


def test_torchrun_of_watched_ranks_speaks_once(scripts):
    scripts.write(GROUP)
    run = ["-m", "stayfinite", "run", "--json", "out.json", "--trace", "train.py", "torchrun"]
    done = scripts.alone("-m", "torch.distributed.run", "--nproc-per-node", "2", *run)
    assert done.code == 1
    assert done.ours == ["the script was stopped at step 2; exit code 3."]
    (incident,) = scripts.result()["incidents"]
    assert (incident["rank"], incident["origin"]["line"]) == (1, LINE)


def rank_record(pid: int, **facts: Any) -> ProcessRecord:
    incident = Incident(step=2, rank=1, time=1.0)
    born = plan.birth_of_process(pid) or ""
    result = RunResult(incidents=(incident,))
    return ProcessRecord(pid=pid, born=born, result=result, stopped=True, **facts)


def watch_of(folder: Path, pid: int) -> Any:
    return SimpleNamespace(pid=pid, plan=SimpleNamespace(folder=str(folder)))


def test_a_rank_waits_for_the_one_that_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher ends that one as soon as another one ends, be it in the midst of its report."""
    speaker = subprocess.Popen(["sleep", "60"])
    records, slept = [rank_record(speaker.pid)], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            processes.have_spoken(watch_of(tmp_path, speaker.pid))
        if len(slept) == 10:
            speaker.kill()
            speaker.wait()

    monkeypatch.setattr(processes.time, "sleep", sleep)
    waiting = watch_of(tmp_path, os.getpid())
    processes.wait_for_speaker(records, waiting)
    assert len(slept) == 3
    (tmp_path / "spoken").unlink()
    processes.wait_for_speaker(records, waiting)
    assert len(slept) == 10, "nobody waits for one that is gone"


def test_two_ranks_that_missed_one_another_do_not_both_report(tmp_path: Path) -> None:
    early, late = watch_of(tmp_path, 8), watch_of(tmp_path, 7)
    assert processes.speaks_for_ranks([rank_record(8)], early)
    assert not processes.speaks_for_ranks([rank_record(7), rank_record(8)], late)


def test_ranks_that_are_started_again_meet_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What those before them have left would end them too."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-test")
    folders = []
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        folders.append(processes.shared_folder())
        os.rmdir(folders[-1])
    assert folders[0] != folders[1]


def test_rank_0_stays_the_one_where_it_began_on_all_ranks(tmp_path: Path) -> None:
    """Its number looks like none at all."""
    watch = Watch(plan.Plan(folder=str(tmp_path), guard=GuardSettings()), key="rank-1-0")
    watch.rank = 1
    assert watch.with_rank(Incident(step=2, rank=0, time=1.0, world=2)).rank == 0
    assert watch.with_rank(Incident(step=2, rank=0, time=1.0)).rank == 1


BESIDE = """
    import time, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = torch.ones(3, 2)
        if step == 2 and rank == 0 and "nan" in {fault!r}:
            x = x.log().log()
        if step == 2 and rank == 1 and "raise" in {fault!r}:
            raise ValueError("a bad file")
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
"""


def side_by_side(scripts: Any, fault: str, *options: str) -> Any:
    scripts.write(BESIDE.format(fault=fault))
    run = ["-m", "stayfinite", "run", *options, "train.py"]
    return scripts.alone("-m", "torch.distributed.run", "--nproc-per-node", "2", *run)


def test_ranks_side_by_side_say_once_that_rank_0_went_bad(scripts):
    done = side_by_side(scripts, "nan", "--on-nan", "recover")
    assert done.code == 0, done.err.decode()
    (told,) = [line for line in done.ours if line.startswith("step 2, ")]
    assert told.startswith("step 2, rank 0: "), told
    assert done.err.count(b"error[") == 1
    assert b"NaN at step 2 on rank 0" in done.err or b"Inf at step 2 on rank 0" in done.err


def test_a_rank_beside_one_that_raised_gives_no_all_clear(scripts):
    done = side_by_side(scripts, "raise")
    assert done.code == 1
    assert b"all finite" not in done.err, done.err.decode()


KILLED = """
    import os, signal, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        if dist.get_rank() == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(3, 2)).pow(2).mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
"""


def test_the_signal_that_ended_a_rank_of_torchrun_is_named(scripts):
    scripts.write(KILLED)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = scripts.warm(*words)
    assert done.code == 1
    assert "was killed by SIGKILL" in done.ours[-1], done.err.decode()
    assert "all finite" not in done.ours[-1]


POOL = """
    import sys, torch
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    def train(seed):
        w = torch.zeros(1, requires_grad=True)
        (w * 0 + (0.5 if seed else 0)).log().sum().backward()
        return seed

    if __name__ == "__main__":
        with ProcessPoolExecutor(1, mp_context=get_context(sys.argv[1])) as pool:
            print(pool.submit(train, 1).result(), flush=True)
            pool.submit(train, 0).result()
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_stop_in_a_pool_is_the_stop_of_the_run(scripts, method):
    scripts.write(POOL)
    options = ["--json", "out.json", "--second-run", "never"]
    done = scripts.warm("train.py", method, options=options)
    assert (done.code, done.out) == (3, b"1\n"), done.err.decode()
    assert b"Traceback" not in done.err
    assert json.loads((scripts.folder / "out.json").read_text())["incidents"]
