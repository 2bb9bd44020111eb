"""A protected block changes nothing: not memory, not objects, not files, not generators."""

import builtins
import collections
import csv
import io
import logging
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from stayfinite.replay import protection
from stayfinite.replay.protection import (
    ReplayEnded,
    ReplayTooLarge,
    ReplayTooLong,
    call_within,
    memory_limit,
    protected,
    resident_bytes,
)


def here():
    return [sys._getframe(1)]


def test_tensors_written_in_place_are_put_back_and_graphs_do_not_notice():
    weight = nn.Parameter(torch.ones(3))
    table, loss = torch.zeros(4), (weight * weight).sum()
    with protected(here()), torch.no_grad():
        weight.mul_(5)
        weight[1:].add_(2)
        table[2:].fill_(7)
        torch._foreach_add_([weight, table], 1.0)
    assert weight.tolist() == [1, 1, 1]
    assert table.tolist() == [0, 0, 0, 0]
    loss.backward()  # it has kept the weight, and counts writes
    assert weight.grad.tolist() == [2, 2, 2]


def test_gradients_buffers_and_modes_are_as_before():
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.5)
    net(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    before = [p.grad.clone() for p in net.parameters()]
    state = {k: v.clone() for k, v in net.state_dict().items()}
    with protected(here()):
        optimizer.zero_grad()
        net(torch.rand(4, 2)).sum().backward()
        net[1].weight.requires_grad_(False)
        net.eval()
        optimizer.param_groups[0]["lr"] = 9.0
        optimizer.step()
    assert all(map(torch.equal, before, [p.grad for p in net.parameters()]))
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert net.training
    assert net[1].weight.requires_grad
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert {float(each["step"]) for each in optimizer.state.values()} == {1.0}


class Meter:
    def __init__(self):
        self.values, self.by_name, self.recent = [], {"a": [1]}, collections.deque([1], maxlen=2)


def test_plain_objects_are_as_before():
    meter, seen, array = Meter(), {1}, np.zeros(2)
    with protected(here()):
        meter.values.append(3)
        meter.by_name["a"].append(2)
        meter.by_name["b"] = 1
        meter.recent.append(5)
        meter.extra = 1
        seen.add(2)
        array += 1
    assert (meter.values, meter.by_name, list(meter.recent)) == ([], {"a": [1]}, [1])
    assert not hasattr(meter, "extra")
    assert seen == {1}
    assert array.tolist() == [0, 0]


def test_generators_are_as_before():
    states = random.getstate(), torch.get_rng_state()
    with protected(here()):
        random.random()
        np.random.rand()
        torch.rand(2)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_nothing_is_written(tmp_path, capfd, caplog):
    old, log = tmp_path / "old.txt", tmp_path / "log.txt"
    old.write_text("old")
    logger = logging.getLogger("users")
    with log.open("w") as file:
        file.write("first\n")
        with protected(here()):
            print("shown")
            print("shown", file=sys.stderr)
            logger.error("logged")
            file.write("second\n")
            file.flush()
            old.write_text("new")
            (tmp_path / "made.txt").write_text("made")
            torch.save({}, tmp_path / "made.pt")
            np.save(tmp_path / "made.npy", np.zeros(1))
            os.replace(old, tmp_path / "moved.txt")
            os.makedirs(tmp_path / "folder", exist_ok=True)
        file.write("third\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "old.txt": "old",
        "log.txt": "first\nthird\n",
    }
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_what_another_thread_writes_is_written(tmp_path):
    go, done, end = threading.Event(), threading.Event(), threading.Event()
    with (tmp_path / "log.txt").open("w") as file:

        def write():
            go.wait(10)
            file.write("theirs")
            file.flush()
            done.set()
            end.wait(10)

        thread = threading.Thread(target=write)
        thread.start()
        with protected(here()):
            go.set()
            assert done.wait(10)
        with pytest.raises(ReplayEnded, match="thread"), protected(here()):
            file.write("ours")
        writer = csv.writer(file)
        with pytest.raises(ReplayEnded, match="thread"), protected(here()):
            writer.writerow(["ours"])
        del writer
        end.set()
        thread.join()
    assert (tmp_path / "log.txt").read_text() == "theirs"


def test_a_thread_that_has_nothing_to_do_with_a_file_does_not_matter(tmp_path):
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(60,))
    thread.start()
    with (tmp_path / "log.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([1])
        with protected(here()):
            writer.writerow([2])
            file.flush()
        writer.writerow([3])
    end.set()
    thread.join()
    assert (tmp_path / "log.csv").read_text().split() == ["1", "3"]


def connect():
    with socket.socket() as ours:
        ours.connect(("127.0.0.1", 9))


@pytest.mark.parametrize(
    "effect",
    [
        lambda: subprocess.run(["true"], check=True),
        lambda: os.system("true"),
        connect,
        lambda: threading.Thread(target=print).start(),
        lambda: os.kill(os.getpid(), 0),
    ],
)
def test_what_leaves_the_process_ends_the_block(effect):
    with pytest.raises(ReplayEnded), protected(here()):
        effect()


def test_what_is_handed_to_a_thread_is_not():
    waiting = queue.Queue()
    with protected(here()):
        waiting.put(1)
    assert waiting.empty()


def test_a_block_that_takes_too_long_is_ended():
    count = [0]
    began = time.monotonic()

    def turn():
        while True:
            time.sleep(1000)
            count[0] += 1

    with pytest.raises(ReplayTooLong), protected(here()):
        call_within(0.3, turn)
    assert time.monotonic() - began < 20
    assert count == [0]  # it has been put back


def test_a_block_that_takes_too_much_memory_is_ended(monkeypatch):
    limit = resident_bytes() + (256 << 20)
    monkeypatch.setattr(protection, "memory_limit", lambda: limit)
    held = []

    def turn():
        for _ in range(1000):
            held.append(np.ones(1 << 20))  # 8 MiB, written to
            time.sleep(0.005)

    with pytest.raises(ReplayTooLarge) as ended, protected(here()):
        call_within(60.0, turn)
    assert ended.value.reason == "it took too much memory"
    assert not held  # it has been put back


def test_a_replay_may_take_three_times_what_a_step_has_taken():
    now = resident_bytes()
    assert now > 1 << 20
    assert memory_limit() >= now + (1 << 30) - (64 << 20)


def test_everything_that_was_replaced_is_back():
    names = [
        (builtins, "open"),
        (io, "open"),
        (torch, "save"),
        (os, "replace"),
        (queue.Queue, "put"),
    ]
    before = [getattr(*name) for name in names]
    streams = sys.stdout, sys.stderr, sys.getprofile(), logging.root.manager.disable
    with pytest.raises(ZeroDivisionError), protected(here()):
        1 / 0  # noqa: B018
    assert [getattr(*name) for name in names] == before
    assert streams == (sys.stdout, sys.stderr, sys.getprofile(), logging.root.manager.disable)


def test_a_deadline_and_a_profiler_get_on_with_each_other():
    code = (
        "import sys\n"
        "from stayfinite.replay.protection import ReplayTooLong, call_within\n"
        "sys.setprofile(lambda *details: None)\n"
        "assert call_within(60.0, lambda: 3) == 3\n"
        "try:\n"
        "    call_within(0.1, lambda: [None for _ in iter(int, 1)])\n"
        "except ReplayTooLong:\n"
        "    print(sum(map(lambda n: n, range(10))))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert ended.stdout.strip() == b"45", ended.stderr


def test_archives_can_be_written_and_leave_nothing(tmp_path):
    path = tmp_path / "rollout.npz"
    np.savez(path, first=np.ones(3))
    before = path.read_bytes()
    with protected(here()):
        np.savez(path, first=np.zeros(5), second=np.ones(2))
        np.savez_compressed(tmp_path / "other.npz", first=np.zeros(5))
        with open(tmp_path / "log.txt", "w+", encoding="utf-8") as log:
            print("step", file=log)
            assert log.tell() == 5
            os.fsync(log.fileno())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["rollout.npz"]
