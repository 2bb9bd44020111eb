"""What `stayfinite run` says in the end is so: only what is finite is called finite."""

from __future__ import annotations

import pytest

BY_HAND = """
    import torch
    w = torch.zeros(2, requires_grad=True)
    for step in range(8):
        loss = ((torch.rand(4, 2) @ w) ** 2).mean()
        if step >= 3:
            loss = loss + torch.log(w.detach().sum() * 0 - 1)
        loss.backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
            w.grad = None
"""
WITH_OPTIMIZER = """
    import sys, torch
    torch.manual_seed(0)
    bad, how = eval(sys.argv[1]), sys.argv[2]
    nn = torch.nn
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        x = torch.rand(4, 2)
        if step in bad:
            x[0, 0] = float("nan")
        loss = (model(x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if how == "poisoned":
        model[1].running_var.fill_(float("nan"))
    model.eval()
    with torch.no_grad():
        test_loss = (model(torch.rand(4, 2)) ** 2).mean()
        if how == "evaluation":
            test_loss = test_loss * float("nan")
        print("test loss", test_loss.item())
"""
RANKS = """
    import os, signal, torch
    import torch.multiprocessing as mp

    def train(rank):
        w = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([w], lr=0.1)
        for step in range(4):
            optimizer.zero_grad(); (w ** 2).sum().backward(); optimizer.step()
            if rank == 1 and step == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    if __name__ == "__main__":
        started = [mp.get_context("spawn").Process(target=train, args=(rank,)) for rank in (0, 1)]
        for process in started: process.start()
        for process in started: process.join()
"""


def run(scripts, source, *args, on_nan):
    scripts.write(source)
    quick = ["--second-run", "never", "--no-record", "--json", "out.json"]
    return scripts.warm("train.py", *args, options=[*quick, "--on-nan", on_nan])


def test_recover_without_an_optimizer_warns_says_so_and_fails(scripts):
    done = run(scripts, BY_HAND, on_nan="recover")
    assert done.code == 3
    assert "no torch optimizer makes this update, so it cannot be skipped" in done.ours[0]
    assert done.ours[-1].startswith("5 incidents in 8 steps; nothing was recovered: only 3 of 8")
    assert not any("all finite" in line for line in done.ours)
    result = scripts.result()
    assert (result["exit"], result["recovered"], len(result["incidents"])) == ("incident", False, 5)
    assert {incident["outcome"]["strategy"] for incident in result["incidents"]} == {"warn"}


def test_a_few_bad_steps_are_recovered_from_with_the_share_and_the_loss(scripts):
    done = run(scripts, WITH_OPTIMIZER, "(5,)", "well", on_nan="recover")
    assert done.code == 0
    last = done.ours[-1]
    assert last.startswith("1 incident in 40 steps; training went on: 39 of 40 steps (98%) were")
    assert "before the first bad one" in last
    assert scripts.result()["recovered"] is True


@pytest.mark.parametrize(
    ("bad", "how", "reason"),
    [
        ("[s for s in range(40) if s % 3]", "well", "only 14 of 40 steps (35%) were good"),
        ("(5,)", "evaluation", "the loss in evaluation is NaN at the end (train.py:"),
        ("(5,)", "poisoned", "at the end buffer"),
    ],
)
def test_a_recovery_that_did_not_help_is_a_failure_with_its_reason(scripts, bad, how, reason):
    done = run(scripts, WITH_OPTIMIZER, bad, how, on_nan="recover")
    assert done.code == 3
    assert f"recovery failed: {reason}" in done.ours[-1] or (
        how == "well" and "gave up" in done.ours[-1]
    )
    assert "recovered from all" not in str(done.ours)


@pytest.mark.parametrize("on_nan", ["stop", "warn", "recover"])
def test_a_loss_that_is_nan_in_evaluation_is_mentioned(scripts, on_nan):
    done = run(scripts, WITH_OPTIMIZER, "()", "evaluation", on_nan=on_nan)
    assert done.code == 0
    (last,) = done.ours
    assert last.startswith("40 steps checked and finite, but in evaluation a loss was NaN")
    assert "train.py:" in last
    assert scripts.result()["exit"] == "finite"


@pytest.mark.parametrize("on_nan", ["stop", "recover"])
def test_buffers_that_are_bad_at_the_end_are_seen(scripts, on_nan):
    done = run(scripts, WITH_OPTIMIZER, "()", "poisoned", on_nan=on_nan)
    assert not any("all finite" in line for line in done.ours)
    assert "running_var" in str(done.err)


def test_a_process_that_was_killed_is_not_called_finite(scripts):
    done = run(scripts, RANKS, on_nan="stop")
    assert not any("all finite" in line for line in done.ours)
    assert "SIGKILL" in done.ours[-1]


@pytest.mark.parametrize(
    ("where", "step"), [("loss", 7), ("gradient", 7), ("update", 7), ("accumulated", 7)]
)
def test_an_incident_has_the_same_step_in_every_mode(scripts, where, step):
    scripts.write(STEPS)
    found = {}
    for options in (
        ["--on-nan", "stop"],
        ["--on-nan", "warn"],
        ["--on-nan", "recover"],
        ["--trace"],
    ):
        quick = ["--second-run", "never", "--no-record", "--json", "out.json"]
        scripts.warm("train.py", where, options=[*quick, *options])
        found[" ".join(options)] = scripts.result()["incidents"][0]["step"]
    assert set(found.values()) == {step}, found


STEPS = """
    import sys, torch
    torch.manual_seed(0)
    where = sys.argv[1]
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.01)
    for step in range(12):
        optimizer.zero_grad()
        for part in range(2 if where == "accumulated" else 1):
            loss = (w ** 2).sum()
            if step == 7 and where in ("loss", "accumulated"):
                loss = loss * torch.log(loss.detach() * 0 - 1)
            if step == 7 and where == "gradient":
                loss = loss + torch.sqrt(w * 0).sum()
            loss.backward()
        if step == 7 and where == "update":
            optimizer.param_groups[0]["lr"] = float("nan")
        optimizer.step()
"""
