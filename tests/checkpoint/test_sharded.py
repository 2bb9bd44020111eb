"""Checkpoints that all ranks write through torch.distributed.checkpoint, or none does."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import Job
from click.testing import CliRunner
from forks import SOURCE, Fork
from meshes import IMPORT, build, digest, train
from ranks import HEAD, answers
from torch import nn

from stayfinite.checkpoint import (
    async_save_checkpoint,
    latest_good,
    load_checkpoint,
    save_checkpoint,
    validate_checkpoint,
)
from stayfinite.cli import main
from stayfinite.errors import CheckpointError, InputError, NonFiniteError

SAVED = (
    IMPORT
    + """
said = {}
for kind in KINDS:
    model, optimizer = build(kind)
    train(model, optimizer, kind, 3)
    stayfinite.save_checkpoint(
        f"{folder}/{kind}", model=model, optimizer=optimizer, step=3, extra={"epoch": 1}, dcp=True
    )
    said[kind] = digest(model, optimizer)
"""
)
LOADED = (
    IMPORT
    + """
said = []
for kind, name in KINDS:
    model, optimizer = build(kind, seed=1)
    loaded = stayfinite.load_checkpoint(f"{folder}/{name}", model=model, optimizer=optimizer)
    assert (loaded.step, loaded.extra, loaded.layout) == (3, {"epoch": 1}, "dcp")
    said.append(digest(model, optimizer))
"""
)


def loaded_on(folder: Path, world: int, kinds: list[tuple[str, str]]) -> list[Any]:
    (folder / "meeting").unlink(missing_ok=True)
    return answers(folder, LOADED.replace("KINDS", repr(kinds)), world=world)


def test_what_two_ranks_save_is_loaded_on_one_two_and_four(tmp_path: Path) -> None:
    kinds = ["fsdp", "tp", "ddp"]
    saved = answers(tmp_path, SAVED.replace("KINDS", repr(kinds)))
    assert saved[0] == saved[1]
    assert saved[0]["fsdp"] == saved[0]["ddp"]
    expected = [saved[0][kind] for kind in kinds]
    for kind, found in zip(kinds, expected, strict=True):
        model, optimizer = build("plain", seed=1)
        load_checkpoint(tmp_path / kind, model=model, optimizer=optimizer)
        assert digest(model, optimizer) == found
    pairs = [("fsdp", "fsdp"), ("tp", "tp"), ("fsdp", "ddp")]
    assert loaded_on(tmp_path, 2, pairs) == [expected] * 2
    pairs = [("fsdp", "fsdp"), ("both", "tp"), ("hsdp", "ddp")]
    assert loaded_on(tmp_path, 4, pairs) == [expected] * 4


REFUSED = (
    IMPORT
    + """
calls = []
def counted(name):
    theirs = getattr(dist, name)
    def inner(*args, **kwargs):
        calls.append([name, args[0].nbytes if name == "all_reduce" else 0])
        return theirs(*args, **kwargs)
    setattr(dist, name, inner)
def text_of(work):
    try:
        work()
    except Exception as error:
        return [type(error).__name__, str(error).replace(folder, "")]
for name in ("all_reduce", "all_gather_object"):
    counted(name)
model, optimizer = build("fsdp")
train(model, optimizer, "fsdp")
parts = {"model": model, "optimizer": optimizer, "dcp": True}
stayfinite.save_checkpoint(f"{folder}/last", step=1, **parts)
good = list(calls)
with torch.no_grad():
    if me == 1:
        local(model.blocks[0].up.weight)[0, 0] = float("nan")
calls.clear()
said = [text_of(lambda: stayfinite.save_checkpoint(f"{folder}/last", step=2, **parts))]
bad = list(calls)
said += [text_of(lambda: stayfinite.save_checkpoint(f"{folder}/0.out", **parts))]
aside = stayfinite.save_checkpoint(f"{folder}/last", if_bad="aside", **parts)
said += [aside.name, good, bad]
loaded = lambda: stayfinite.load_checkpoint(aside, model=model, optimizer=optimizer)
before = digest(model, optimizer)
said += [text_of(loaded)[0], digest(model, optimizer) == before]
other = torch.nn.Linear(2, 2)
with torch.no_grad():
    other.weight.fill_(me)
said += [text_of(lambda: stayfinite.save_checkpoint(f"{folder}/other", model=other, dcp=True))]
"""
)


def test_what_one_rank_finds_bad_is_refused_on_all_with_the_same_error(tmp_path: Path) -> None:
    one, other = answers(tmp_path, REFUSED)
    assert one == other
    kind, text = one[0]
    assert kind == "NonFiniteError"
    assert "model.blocks.0.up.weight: holds NaN (of shape [10, 6]), on rank 1." in text
    assert one[1][0] == "CheckpointError"
    assert "is not a folder of torch.distributed.checkpoint" in one[1][1]
    assert one[2] == "last.nonfinite"
    # One word before, one after; and who has found what, if somebody has.
    assert one[3] == [["all_reduce", 40], ["all_reduce", 8]]
    assert one[4] == [["all_reduce", 40], ["all_gather_object", 0]]
    assert one[5:7] == ["CheckpointError", True]
    assert "other tensors under the same names" in one[7][1]
    names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert names == {"last", "last.nonfinite"}
    assert latest_good(tmp_path) == tmp_path / "last"
    assert load_checkpoint(tmp_path / "last").step == 1


ASYNC = (
    IMPORT
    + """
model, optimizer = build("fsdp")
said = []
for step in range(4):
    train(model, optimizer, "fsdp")
    said.append(digest(model, optimizer))
    saving = stayfinite.async_save_checkpoint(
        f"{folder}/last", model=model, optimizer=optimizer, step=step
    )
    train(model, optimizer, "fsdp", 2)
said.append(saving.result().name)
"""
)


def test_async_saves_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    one, other = answers(tmp_path, ASYNC)
    assert one == other
    assert one[-1] == "last"
    for name, step in (("last", 3), ("last.1", 2)):
        model, optimizer = build("plain", seed=1)
        assert load_checkpoint(tmp_path / name, model=model, optimizer=optimizer).step == step
        assert digest(model, optimizer) == one[step]


KILLED = (
    IMPORT
    + """
import os, signal
def killing(owner, name, is_here, is_after=False):
    theirs = getattr(owner, name)
    def inner(*args, **kwargs):
        result = theirs(*args, **kwargs) if is_after else None
        if is_here(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return result if is_after else theirs(*args, **kwargs)
    setattr(owner, name, inner)
model, optimizer = build("fsdp")
for step in range(3):
    train(model, optimizer, "fsdp")
    if step == 2:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        if point == "writing" and me == 1:
            killing(os, "fsync", lambda *args: True)
        if point == "metadata" and me == 0:
            killing(FileSystemWriter, "finish", lambda *args: True)
        if point == "renames" and me == 0:
            killing(os, "replace", lambda old, new: str(new).endswith("last.1"), is_after=True)
    stayfinite.save_checkpoint(
        f"{folder}/last", model=model, optimizer=optimizer, step=step, dcp=True
    )
"""
)


@pytest.mark.parametrize("point", ["writing", "metadata", "renames"])
def test_a_rank_that_is_killed_leaves_the_generation_before(tmp_path: Path, point: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(HEAD.format(how='"gloo"', seconds=60) + f"point = {point!r}\n" + KILLED)
    environment = {"PYTHONPATH": SOURCE, "PATH": "", "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "out", "wb") as out:
        words = [[str(script), str(tmp_path), str(me), "2"] for me in range(2)]
        ranks = [Fork(w, env=environment, cwd=tmp_path, stdout=out, stderr=out) for w in words]
    codes = [rank.wait(timeout=120) for rank in ranks]
    assert -signal.SIGKILL in codes
    assert 0 not in codes, "the other rank has gone on as if all were well"
    found = latest_good(tmp_path)
    assert found is not None
    assert latest_good(tmp_path / "last") == found
    model, optimizer = build("plain")
    assert load_checkpoint(found, model=model, optimizer=optimizer).step == 1
    # The next save works, and nothing is left of the killed one.
    save_checkpoint(tmp_path / "last", model=model, optimizer=optimizer, step=5, dcp=True)
    assert load_checkpoint(tmp_path / "last").step == 5
    assert load_checkpoint(tmp_path / "last.1").step == 1
    assert not list(tmp_path.glob(".last*"))


CALLS = ("mkdir", "fsync", "rename", "replace", "link", "rmdir")


def killed_save(path: Path, at: int, *, after: bool) -> bool:
    """Save step 3 in a fork that is killed at a call; whether there was that call."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    try:
        seen = 0

        def around(call: Callable[..., Any]) -> Callable[..., Any]:
            def inner(*args: Any, **kwargs: Any) -> Any:
                nonlocal seen
                seen, is_here = seen + 1, seen == at
                if is_here and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    return call(*args, **kwargs)
                finally:
                    if is_here:
                        os.kill(os.getpid(), signal.SIGKILL)

            return inner

        for name in CALLS:
            setattr(os, name, around(getattr(os, name)))
        saved(path, 3)
    finally:
        os._exit(0)


def saved(path: Path, step: int) -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(step)
    save_checkpoint(path, model=model, step=step, dcp=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_at_every_call_leaves_a_good_generation(tmp_path: Path) -> None:
    steps = []
    for at in range(100):
        for after in (False, True):
            folder = tmp_path / f"{at}-{after}"
            for step in (1, 2):
                saved(folder / "last", step)
            if not killed_save(folder / "last", at, after=after):
                assert at > 5
                assert set(steps) == {2, 3}
                return
            found = latest_good(folder)
            assert found is not None
            steps.append(load_checkpoint(found).step)
            assert steps[-1] in (2, 3)
            model = nn.Linear(3, 2)
            assert load_checkpoint(found, model=model).step == int(model.weight[0, 0])
            saved(folder / "last", 4)
            assert load_checkpoint(folder / "last").step == 4
            assert load_checkpoint(folder / "last.1").step == steps[-1]
            assert not list(folder.glob(".last*"))


@pytest.mark.parametrize("is_async", [False, True])
def test_one_process_goes_on_from_a_folder_as_if_never_stopped(
    tmp_path: Path, is_async: bool
) -> None:
    job = Job()
    job.train(3)
    parts = {
        name: getattr(job, name) for name in ("model", "optimizer", "scheduler", "scaler", "ema")
    }
    extra = {"steps": job.steps, "at": (1, {2: torch.ones(2)})}
    if is_async:
        async_save_checkpoint(tmp_path / "last", **parts, step=3, extra=extra).result()
    else:
        save_checkpoint(tmp_path / "last", **parts, step=3, extra=extra, dcp=True)
    expected = job.train(3)
    other = Job(seed=1)
    other.train(1)
    parts = {name: getattr(other, name) for name in parts}
    loaded = load_checkpoint(tmp_path / "last", **parts)
    assert repr(loaded.extra) == repr(extra)
    assert loaded.warnings == ()
    assert other.train(3) == expected


def test_generations_of_folders_are_kept_and_bad_ones_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "last"
    for step in range(5):
        saved(path, step)
    assert sorted(os.listdir(tmp_path)) == ["last", "last.1"]
    done = CliRunner().invoke(main, ["check", str(path)])
    assert done.exit_code == 0, done.output
    data = next(path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-200])
    assert validate_checkpoint(path) != []
    assert latest_good(tmp_path) == latest_good(path) == tmp_path / "last.1"
    with pytest.raises(CheckpointError, match=r"last\.1 beside it is undamaged"):
        load_checkpoint(path)
    saved(path, 6)  # the damaged one pushes no good one out
    assert sorted(os.listdir(tmp_path)) == ["last", "last.1", "last.damaged"]
    assert load_checkpoint(tmp_path / "last.1").step == 3


def test_nothing_of_others_is_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder"):
        with pytest.raises(InputError, match=r"not a folder of torch\.distributed"):
            saved(tmp_path / name, 1)
    saved(tmp_path / "dcp", 1)
    with pytest.raises(InputError, match="is a folder"):
        save_checkpoint(tmp_path / "dcp", model=nn.Linear(3, 2))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(CheckpointError, match="belongs to no model"):
        save_checkpoint(tmp_path / "new", model=model, optimizer=optimizer, dcp=True)
    nn.init.constant_(model.weight, float("inf"))
    with pytest.raises(NonFiniteError, match=r"model.weight: holds \+Inf"):
        async_save_checkpoint(tmp_path / "new", model=model)
    assert not (tmp_path / "new").exists()


def test_torch_itself_can_read_the_folder(tmp_path: Path) -> None:
    model, optimizer = build("plain")
    train(model, optimizer, "plain")
    save_checkpoint(tmp_path / "last", model=model, optimizer=optimizer, dcp=True)
    empty = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    state = {"model": empty, "optimizer": {"state": {"head.bias": {"exp_avg": torch.zeros(1)}}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "last", no_dist=True)
    assert all(torch.equal(value, empty[name]) for name, value in model.state_dict().items())
    moment = optimizer.state[model.head.bias]["exp_avg"]
    assert torch.equal(state["optimizer"]["state"]["head.bias"]["exp_avg"], moment)
