"""No damaged file is ever loaded, whichever bit it was."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import IS_PROOF, Job
from xxhash import xxh3_128

from stayfinite.checkpoint import load_checkpoint, save_checkpoint, stream, validate_checkpoint
from stayfinite.checkpoint.format import digest
from stayfinite.errors import CheckpointError

# The same ones each time.
FLIPS, CUTS = (10_000, 10_000) if IS_PROOF else (500, 200)


@pytest.fixture(scope="module")
def job() -> Job:
    job = Job()
    job.train(2)
    return job


@pytest.fixture(scope="module")
def good(job: Job, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return job.save(tmp_path_factory.mktemp("good") / "a.ckpt").read_bytes()


def is_refused(path: Path, job: Job) -> bool:
    """Whether validating finds an error and loading raises, both without touching anything."""
    problems = validate_checkpoint(path)
    with pytest.raises(CheckpointError):
        job.load(path)
    return any(problem.kind in ("damaged", "unreadable") for problem in problems)


def test_flipped_bits_are_detected_and_the_model_is_untouched(
    tmp_path: Path, job: Job, good: bytes
) -> None:
    path, before = tmp_path / "a.ckpt", job.bytes()
    places = random.Random(0).sample(range(len(good) * 8), FLIPS)
    for place in places:
        data = bytearray(good)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        assert is_refused(path, job), f"bit {place}"
    assert job.bytes() == before


def test_flipped_bits_of_large_tensors_are_detected(tmp_path: Path) -> None:
    model = torch.nn.Linear(1100, 1000)  # more than one piece
    path = save_checkpoint(tmp_path / "a.ckpt", model=model)
    assert path is not None
    good = path.read_bytes()
    for place in random.Random(2).sample(range(len(good) * 8), FLIPS // 10):
        data = bytearray(good)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        assert validate_checkpoint(path), f"bit {place}"


def test_every_bit_of_the_marks_is_guarded(tmp_path: Path, job: Job, good: bytes) -> None:
    """Where a file could turn into one without checksums: length, marks, and the seal's entry."""
    path = tmp_path / "a.ckpt"
    names = (b'"stayfinite"', b'"stayfinite.seal"', b"__metadata__", b"stayfinite seal2")
    spans = [(0, 9), *((good.index(name), good.index(name) + len(name)) for name in names)]
    for byte in (byte for start, stop in spans for byte in range(start, stop)):
        for bit in range(8):
            data = bytearray(good)
            data[byte] ^= 1 << bit
            path.write_bytes(data)
            assert validate_checkpoint(path), f"byte {byte} bit {bit}"


def test_truncated_files_are_detected_and_the_model_is_untouched(
    tmp_path: Path, job: Job, good: bytes
) -> None:
    path, before = tmp_path / "a.ckpt", job.bytes()
    lengths = [0, 1, 7, 8, 9, len(good) - 1, *random.Random(1).sample(range(len(good)), CUTS - 6)]
    for length in lengths:
        path.write_bytes(good[:length])
        assert is_refused(path, job), f"{length} bytes"
    assert job.bytes() == before


@pytest.mark.parametrize("added", [b"\0", b"stayfinite seal2", bytes(4096)])
def test_longer_files_are_detected(tmp_path: Path, job: Job, good: bytes, added: bytes) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(good + added)
    assert is_refused(path, job)


def test_lost_and_swapped_blocks_are_detected(tmp_path: Path, job: Job, good: bytes) -> None:
    path = tmp_path / "a.ckpt"
    for start in range(0, len(good) - 1024, 512):
        first, second = good[start : start + 512], good[start + 512 : start + 1024]
        for changed in (bytes(512) + second, second + first, first + first):
            if changed != first + second:
                path.write_bytes(good[:start] + changed + good[start + 1024 :])
                assert is_refused(path, job), f"block at {start}"


def test_damaged_tensor_is_named(tmp_path: Path, job: Job, good: bytes) -> None:
    path = tmp_path / "a.ckpt"
    at = good.index(job.model.first.bias.detach().numpy().tobytes())
    data = bytearray(good)
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.first\.bias: its bytes are not those") as e:
        load_checkpoint(path, model=job.model)
    assert [problem.key for problem in e.value.problems] == ["model.first.bias"]


def test_threads_read_the_same_and_name_the_same_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_WORTH_THREADS", 0)
    model = torch.nn.Sequential(torch.nn.Linear(1100, 1000), torch.nn.Linear(1000, 1100))
    path = save_checkpoint(tmp_path / "a.ckpt", model=model)
    assert path is not None
    loaded = load_checkpoint(path).state["model"]
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    data = bytearray(path.read_bytes())
    at = data.index(model[1].weight.detach().numpy().tobytes())
    data[at + model[1].weight.nbytes - 1] ^= 1  # in its second piece
    path.write_bytes(data)
    assert [problem.key for problem in validate_checkpoint(path)] == ["model.1.weight"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"hello", bytes(100), b"\x02" + bytes(7) + b"{}", b"PK\x03\x04rubbish"],
)
def test_other_files_are_not_readable_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.ckpt"
    path.write_bytes(content)
    problems = validate_checkpoint(path, torch.nn.Linear(1, 1))
    assert problems
    assert all("\n" not in problem.message for problem in problems)
    with pytest.raises(CheckpointError):
        load_checkpoint(path, model=torch.nn.Linear(1, 1))


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    (problem,) = validate_checkpoint(tmp_path / "none.ckpt")
    assert problem.kind == "unreadable"
    assert "there is no such file" in problem.message
    with pytest.raises(CheckpointError, match="there is no such file"):
        load_checkpoint(tmp_path / "none.ckpt")


def test_error_of_a_damaged_file_names_an_older_one_that_is_whole(tmp_path: Path) -> None:
    job = Job()
    path = job.save(tmp_path / "a.ckpt")
    job.save(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"a\.ckpt\.1 beside it is undamaged"):
        job.load(path)


def test_file_of_an_older_format_is_refused_in_one_line(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "a.ckpt"
    older = good.replace(b'"stayfinite":"2"', b'"stayfinite":"1"')
    path.write_bytes(older[:-1] + b"1")
    (problem,) = validate_checkpoint(path)
    assert problem.kind == "unreadable"
    assert problem.message.endswith(
        "it has format 1, and this version of stayfinite reads format 2. "
        "Load it with the version that saved it."
    )
    path.write_bytes(older)  # only the number changed, so it is no older file
    (problem,) = validate_checkpoint(path)
    assert problem.message.endswith("its header or its checksums were damaged.")


@pytest.mark.parametrize("count", [0, 1, 4_194_303, 4_194_304, 4_194_305])
def test_digest_is_that_of_the_format(count: int) -> None:
    """As docs/checkpoints.md describes it."""
    content = np.random.default_rng(0).integers(0, 256, count, dtype=np.uint8)
    data = content.tobytes()
    parts = [data[at : at + 4_194_304] for at in range(0, max(1, count), 4_194_304)]
    assert digest(content) == xxh3_128(b"".join(xxh3_128(part).digest() for part in parts)).digest()
