"""A bad step on one of two ranks: all ranks tell the same, and name the rank where it began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import answers

from stayfinite.report.run_summary import summary_of
from stayfinite.report.store.reading import read_run

TRAINING = """
import os, stayfinite
from torch.nn.parallel import DistributedDataParallel
from stayfinite.report.sinks import _again
from stayfinite.report.terminal import as_text
from stayfinite.testing import inject

capsules = []

def run(*, bad, ours=True, fault=None, run_dir=None):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    torch.manual_seed(me)
    batches = [torch.rand(4, 3) + 0.5 for _ in range(8)]
    if me in bad:
        batches[3][1, 2] = batches[5][1, 2] = -0.5

    def step(x):
        optimizer.zero_grad()
        model(torch.log(x)).square().mean().backward()
        optimizer.step()

    guard = stayfinite.watch(model, optimizer, sinks=[], run_dir=run_dir)
    with guard:
        if fault:
            fault = inject(model, optimizer, at_step=3, rank=1, **fault)
            fault.__enter__()
        for x in batches:
            guard.step(step, x) if ours else step(x)
        if fault:
            fault.__exit__(None, None, None)
    first = guard.incidents[0]
    try:
        capsules.append(guard.capsule(os.path.join(folder, f"{len(capsules)}-{me}.capsule")).name)
    except stayfinite.StayFiniteError as error:
        capsules.append(str(error))
    return {
        "ranks": [i.rank for i in guard.incidents],
        "steps": [i.step for i in guard.incidents],
        "causes": [i.diagnosis and i.diagnosis.cause for i in guard.incidents],
        "phase": first.origin and first.origin.phase,
        "code": first.origin and first.origin.code,
        "why": first.diagnosis and first.diagnosis.why,
        "head": as_text(first).splitlines()[0],
        "again": _again(first, 2),
        "weights": model.module.weight.tolist(),
    }
"""


SCENES = """
import datetime, stayfinite.distributed, stayfinite.guard.ranks as sharing
from stayfinite.distributed import BAD, WORLD, say_word

said = {
    "one": run(bad=[1], run_dir=os.path.join(folder, "run")),
    "all": run(bad=[0, 1]),
    "not ours": run(bad=[1], ours=False),
    "passing": run(bad=[], fault={"loss": True}),
    "reduced": run(bad=[], fault={"gradient": "module.weight"}),  # on its way into the all-reduce
    "certain": [
        say_word(WORLD, verdict=BAD * bool(n[me]), is_harmed=False, certainty=n[me])[2:4]
        for n in [(0, 0), (0, 2), (2, 1), (1, 1), (0, 1)]
    ],
}

def broken(*_):
    raise OSError("the store is gone")

stayfinite.distributed._PATIENCE = datetime.timedelta(seconds=0.1)
sharing.tell = broken
said["unheard"] = run(bad=[1])
said["capsules"] = capsules[:2]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def scenes(folder: Path) -> dict[str, list[Any]]:
    first, second = answers(folder, TRAINING + SCENES)
    return {name: [first[name], second[name]] for name in first}


@pytest.mark.parametrize("name", ["one", "all", "not ours", "passing", "reduced", "unheard"])
def test_ranks_stay_equal(scenes: dict[str, list[Any]], name: str) -> None:
    first, second = scenes[name]
    assert first["weights"] == second["weights"]


def test_all_ranks_tell_what_the_guilty_one_has_found(scenes: dict[str, list[Any]]) -> None:
    first, second = scenes["one"]
    assert first == second
    assert first["ranks"] == [1, 1]
    assert first["steps"] == [3, 5]
    assert first["causes"] == ["log_of_negative"] * 2
    assert "torch.log(x)" in first["code"]
    assert " at step 3 on rank 1 in the loss" in first["head"]
    assert first["again"].startswith("stayfinite: step 3 on rank 1: log_of_negative at rank.py:")


def test_of_a_bug_of_all_ranks_the_first_is_named_by_each(scenes: dict[str, list[Any]]) -> None:
    first, second = scenes["all"]
    assert first == second
    assert first["ranks"] == [0, 0]
    assert " on rank 0 " in first["head"]
    assert first["causes"] == second["causes"] == ["log_of_negative"] * 2


def test_in_a_loop_that_is_not_ours_the_bad_loss_tells_the_rank(
    scenes: dict[str, list[Any]],
) -> None:
    first, second = scenes["not ours"]
    assert first["ranks"] == second["ranks"] == [1, 1]
    assert " on rank 1 in the loss" in first["head"]


def test_a_passing_fault_in_the_loss_is_told_with_its_rank(scenes: dict[str, list[Any]]) -> None:
    first, second = scenes["passing"]
    assert first == second
    assert (first["ranks"], first["causes"]) == ([1], ["transient_fault"])


def test_a_gradient_is_seen_on_its_way_into_the_all_reduce(scenes: dict[str, list[Any]]) -> None:
    first, second = scenes["reduced"]
    assert first["ranks"] == second["ranks"] == [1]
    assert " on rank 1" in first["head"]


def test_a_rank_that_is_not_heard_is_not_waited_for(scenes: dict[str, list[Any]]) -> None:
    first, second = scenes["unheard"]
    assert first["ranks"] == second["ranks"] == [1, 1]
    assert (first["phase"], first["causes"]) == ("distributed", ["unknown"] * 2)
    assert "the collective brought the bad ones from another" in first["why"]
    assert second["causes"] == ["log_of_negative"] * 2


def test_the_most_certain_rank_is_the_first_of_the_highest(scenes: dict[str, list[Any]]) -> None:
    """Where all have seen it after the reduction only, nobody knows."""
    assert scenes["certain"] == [[[-1, 0], [1, 2], [0, 2], [-1, 1], [1, 1]]] * 2


def test_a_capsule_is_written_where_the_step_went_bad(scenes: dict[str, list[Any]]) -> None:
    first, second = scenes["capsules"]
    assert first == ["the step went bad on rank 1: call guard.capsule there.", "1-0.capsule"]
    assert second == ["0-1.capsule", "the step went bad on rank 0: call guard.capsule there."]


def test_show_names_the_rank_and_tells_of_a_shared_incident_once(
    scenes: dict[str, list[Any]], folder: Path
) -> None:
    shown = summary_of(read_run(folder / "run"))
    assert [(row.step, row.rank) for row in shown.incidents] == [(3, 1), (5, 1)]
    assert " at step 3 on rank 1 " in shown.incidents[0].headline


IN_PART = """
import stayfinite
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

pair, mesh = dist.new_group([0, 1]), DeviceMesh("cpu", [0, 1])
wrapped = {
    "ddp": lambda net: nn.parallel.DistributedDataParallel(net, process_group=pair),
    "fsdp1": lambda net: FullyShardedDataParallel(
        net, process_group=pair, device_id=torch.device("cpu")
    ),
    "fsdp2": lambda net: fully_shard(net, mesh=mesh),
}

def run(wrap):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stayfinite.watch(model, optimizer, sinks=[]) as guard:
        for step in range(4):
            x = torch.ones(3, 4) * (step + me)
            if step == 2 and me == 1:
                x = x * torch.nan
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return [[each.step, each.rank, each.outcome.strategy] for each in guard.incidents]

said = {name: run(wrap) for name, wrap in wrapped.items()} if me < 2 else {}
dist.barrier()
"""


def test_ranks_that_do_not_train_are_not_asked(tmp_path: Path) -> None:
    """As those that only generate text beside a training: they would never answer."""
    said = answers(tmp_path, IN_PART, world=3, seconds=60)
    expected = {kind: [[2, 1, "skip"]] for kind in ("ddp", "fsdp1", "fsdp2")}
    assert said == [expected, expected, {}]
