"""A capsule from anybody: a typed error within a second and little memory, and nothing is run."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from capsules import everything_in, forged, parts_of, small_capsule, with_contents
from checkpoints import IS_PROOF

import stayfinite
from stayfinite.capsule import Capsule, read_capsule, write_capsule
from stayfinite.checkpoint import save_checkpoint
from stayfinite.errors import CapsuleError

# The same ones each time.
BYTES, TREES = (180_000, 25_000) if IS_PROOF else (2_000, 600)
HOSTILE = (
    None, True, -1, 2**63, 10**30, "", "../x.py", "/etc/x.py", "a\x00.py", "x" * 5000, [], {},
    [[]] * 50, {"$tensor": "batch.0.0"}, {"$tensor": "nowhere"}, {"$size": [2**62, 2**62]},
    {"$device": "cuda:999"}, {"$dtype": "load"}, {"$number": ["O", 1]}, {"$number": ["a", 1]},
    {"$bytes": "%%"}, {"$set": [[]]}, {"$unknown": 1}, {"$tuple": 3},
    {"$dict": [[{"$tensor": "random"}, 1]]}, "aten.from_file.default", "nan", {"$float": "inf"},
)  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "a.capsule"
    return write_capsule(path, small_capsule()).read_bytes()


@pytest.fixture
def quick_file() -> Iterator[Path]:
    """A file in memory: on a disk, writing takes longer than reading."""
    descriptor = os.memfd_create("capsule")
    yield Path(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)


def outcome(path: Path, content: bytes) -> Capsule | CapsuleError:
    """What reading gives; any other error than ours fails the test, and so does a slow one."""
    path.write_bytes(content)
    began = time.process_time()
    try:
        return read_capsule(path)
    except CapsuleError as error:
        return error
    finally:
        assert time.process_time() - began < 1


def cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def flipped(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def overwritten(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    length = draw.choice((1, 4, 8, 64, 512))
    data[start : start + length] = draw.randbytes(min(length, len(data) - start))


def inserted(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    data[start:start] = draw.choice((b"\x00", b"[" * 3000, b'"', b"}", b"99999999", b"\xff" * 40))


def removed(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    del data[start : start + draw.choice((1, 2, 8, 100, 1000))]


def moved(data: bytearray, draw: random.Random) -> None:
    start, stop = sorted(draw.sample(range(len(data)), 2))
    piece = data[start:stop]
    del data[start:stop]
    place = draw.randrange(len(data) + 1)
    data[place:place] = piece


def said_longer(data: bytearray, draw: random.Random) -> None:
    data[:8] = draw.choice((0, 1, 2**20, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")


DAMAGE = (cut, flipped, overwritten, inserted, removed, moved, said_longer)


def test_no_damaged_file_is_read(
    quick_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    draw, refused = random.Random(0), 0
    for number in range(BYTES):
        data = bytearray(good)
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            if data:
                DAMAGE[number % len(DAMAGE)](data, draw)
        if data == good:
            continue
        found = outcome(quick_file, bytes(data))
        assert isinstance(found, CapsuleError), f"number {number}"
        refused += 1
    print(f"{refused:,} damaged files were refused")
    assert refused > 0.95 * BYTES
    assert everything_in(tmp_path) == set()


def places_in(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        here = waiting.pop()
        items = here.items() if isinstance(here, dict) else enumerate(here)
        for key, item in items:
            found.append((here, key))
            if isinstance(item, (dict, list)):
                waiting.append(item)
    return found


def tampered(tree: Any, draw: random.Random) -> None:
    here, key = draw.choice(places_in(tree))
    action = draw.randrange(4)
    if action == 0:
        del here[key]
    elif action == 1 and isinstance(here, dict):
        here[f"{key}'"] = here.pop(key)
    elif action == 2:
        other, name = draw.choice(places_in(tree))
        here[key] = json.loads(json.dumps(other[name]))
    else:
        here[key] = copy.deepcopy(draw.choice(HOSTILE))


def test_forged_contents_are_refused_or_make_sense(
    quick_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    draw, refused = random.Random(1), 0
    for _ in range(TREES):

        def change(tree: Any) -> None:
            for _ in range(draw.choice((1, 1, 2, 4))):
                tampered(tree, draw)

        found = outcome(quick_file, with_contents(good, change))
        refused += isinstance(found, CapsuleError)
    print(f"{refused:,} of {TREES:,} forged files were refused")
    assert refused > TREES / 3
    assert everything_in(tmp_path) == set()


def test_forging_is_forging(tmp_path: Path, good: bytes) -> None:
    """Else the tests beside this one would only show that the seal is looked at."""
    found = outcome(tmp_path / "a.capsule", with_contents(good, lambda tree: tree.update(made=7)))
    assert isinstance(found, Capsule)
    assert found.made == 7
    assert isinstance(outcome(tmp_path / "b.capsule", forged(*parts_of(good))), Capsule)


def header_with(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update(entries)


@pytest.mark.parametrize(
    "change",
    [
        header_with(huge={"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}),
        header_with(huge={"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**64]}),
        header_with(huge={"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}),
        header_with(negative={"dtype": "U8", "shape": [-1], "data_offsets": [0, -1]}),
        header_with(odd={"dtype": "PICKLE", "shape": [0], "data_offsets": [0, 0]}),
        header_with(odd={"dtype": "U8", "shape": "many", "data_offsets": [0, 0]}),
        header_with(odd=[]),
        lambda header: header["__metadata__"].update(capsule="2"),
        lambda header: header["__metadata__"].update(capsule=1),
        lambda header: header["__metadata__"].update(stayfinite="3"),
        lambda header: header["__metadata__"].update(contents="[" * 100_000),
        lambda header: header["__metadata__"].update(contents='{"a":1,"a":2}'),
        lambda header: header["__metadata__"].update(contents="9" * 100_000),
        lambda header: header["__metadata__"].pop("contents"),
        lambda header: header.update(__metadata__=[1]),
    ],
)
def test_forged_header_is_refused(
    tmp_path: Path, good: bytes, change: Callable[[dict[str, Any]], None]
) -> None:
    header, data = parts_of(good)
    change(header)
    assert isinstance(outcome(tmp_path / "a.capsule", forged(header, data)), CapsuleError)


def test_newer_capsule_says_so(tmp_path: Path, good: bytes) -> None:
    header, data = parts_of(good)
    header["__metadata__"]["capsule"] = "2"
    found = outcome(tmp_path / "a.capsule", forged(header, data))
    assert "Update stayfinite" in str(found)


@pytest.mark.parametrize(
    "name",
    [
        "../up.py", "/root.py", "a/../../b.py", "C:/x.py", "..\\x.py", "a//b.py", "", ".py/",
        "a\n.py", "a/./b.py", "con\x00.py", " a.py", "a./b.py", "x" * 300 + ".py", "train.py",
        "TRAIN.PY", "train.py/b.py", "/".join("a" * 30) + ".py",
    ],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, good: bytes, name: str) -> None:
    change = with_contents(good, lambda tree: tree["sources"][1].update(name=name))
    found = outcome(tmp_path / "a.capsule", change)
    assert isinstance(found, CapsuleError), found


def test_what_is_no_capsule_is_refused(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "a.ckpt", model=torch.nn.Linear(2, 2))
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    assert checkpoint is not None
    for path in (checkpoint, tmp_path, *(tmp_path / n for n in ("text", "empty", "pipe", "none"))):
        with pytest.raises(CapsuleError, match=path.name):
            read_capsule(path)


MEASURE = """
import sys, time
from stayfinite.capsule import read_capsule
from stayfinite.errors import CapsuleError
import torch
torch.zeros(3).sum()

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # forget the peak so far
before = peak()
for path in sys.argv[1:]:
    began = time.process_time()
    try:
        read_capsule(path)
    except CapsuleError:
        print(f"{time.process_time() - began:.3f}")
print((peak() - before) // 1024)
"""


def test_the_worst_files_cost_little_time_and_memory(tmp_path: Path, good: bytes) -> None:
    header, data = parts_of(good)
    metadata = header["__metadata__"]
    worst = {"lists": "[" + "[]," * 1_200_000 + "[]]", "numbers": "[" + "1," * 1_900_000 + "1]"}
    worst["objects"] = "[" + '{"a":{}},' * 40_000 + "1]"
    worst["few lists"] = "[" + "[]," * 90_000 + "[]]"
    for name, contents in worst.items():
        whole = {**header, "__metadata__": {**metadata, "contents": contents}}
        (tmp_path / name).write_bytes(forged(whole, data))
    for name, count in (("too many", 4_100), ("as many as there may be", 3_990)):
        each = {"dtype": "U8", "shape": []}
        entries = {f"{n:x}": {**each, "data_offsets": [n, n + 1]} for n in range(count)}
        (tmp_path / name).write_bytes(forged({"__metadata__": metadata, **entries}, bytes(count)))
    with open(tmp_path / "sparse", "wb") as file:  # 100 GB that take no room
        file.write((1 << 20).to_bytes(8, "little"))
        file.truncate(100 << 30)
    full = {"zeros": {"dtype": "U8", "shape": [150 << 20], "data_offsets": [0, 150 << 20]}}
    whole = {"__metadata__": {**metadata, "contents": "{}"}, **full}
    (tmp_path / "full").write_bytes(forged(whole, bytes(150 << 20)))
    paths = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *paths],
        env={**os.environ, "PYTHONPATH": str(Path(stayfinite.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    *seconds, megabytes = done.stdout.split()
    print(dict(zip(paths, seconds, strict=True)), f"{megabytes} MB")
    assert len(seconds) == len(paths)
    assert max(map(float, seconds)) < 1
    assert int(megabytes) < 256
