"""Files of others: torch, Lightning, Hugging Face, torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
import pickle
import random
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import IS_PROOF, fingerprint, values_only
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from stayfinite.checkpoint import load_checkpoint, save_checkpoint, validate_checkpoint
from stayfinite.checkpoint.format import parse
from stayfinite.errors import CheckpointError

DAMAGES = 500 if IS_PROOF else 40


def build(seed: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    for _ in range(seed):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def dicts() -> Iterator[Any]:
    model, optimizer, scheduler = build(2)
    weights, moments, rates = model.state_dict(), optimizer.state_dict(), scheduler.state_dict()
    plain = {"model": weights, "optimizer": moments, "scheduler": rates, "step": 7}
    yield pytest.param(plain, "torch", id="plain")
    names = ("model_state_dict", "optimizer_state_dict", "scheduler_state_dict", "step")
    renamed = dict(zip(names, plain.values(), strict=True))
    yield pytest.param(renamed, "torch", id="long names")
    wrapped = {f"module.{key}": value for key, value in weights.items()}
    yield pytest.param({**plain, "model": wrapped}, "torch", id="DDP")
    compiled = {f"_orig_mod.{key}": value for key, value in weights.items()}
    yield pytest.param({**plain, "model": compiled}, "torch", id="compiled")
    lightning = {
        "pytorch-lightning_version": "2.4.0",
        "global_step": 7,
        "state_dict": {f"model.{key}": value for key, value in weights.items()},
        "optimizer_states": [moments],
        "lr_schedulers": [rates],
        "loops": {},
    }
    yield pytest.param(lightning, "lightning", id="lightning")


@pytest.mark.parametrize(("saved", "layout"), list(dicts()))
def test_dict_of_torch_save(tmp_path: Path, saved: Any, layout: str) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(saved, path)
    assert validate_checkpoint(path) == []
    model, optimizer, scheduler = build(1)
    loaded = load_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler)
    expected = build(2)
    assert (loaded.layout, loaded.step, loaded.warnings) == (layout, 7, ())
    for mine, theirs in zip((model, optimizer, scheduler), expected, strict=True):
        assert values_only(fingerprint(mine)) == values_only(fingerprint(theirs))


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_bare_state_dict(tmp_path: Path, options: Any) -> None:
    path, model = tmp_path / "a.pth", build(1)[0]
    torch.save(build(2)[0].state_dict(), path, **options)
    load_checkpoint(path, model=model)
    assert values_only(fingerprint(model)) == values_only(fingerprint(build(2)[0]))


def test_flipped_bits_in_a_zip_file_are_detected(tmp_path: Path) -> None:
    """torch.load reads such a file without a word."""
    path, model = tmp_path / "a.pt", build(1)[0]
    torch.save(build(2)[0].state_dict(), path)
    data = bytearray(path.read_bytes())
    data[data.index(build(2)[0][0].weight.detach().numpy().tobytes()) + 1] ^= 1
    path.write_bytes(data)
    torch.load(path, weights_only=True)
    before = fingerprint(model)
    with pytest.raises(CheckpointError, match="its bytes differ from the zip file's checksum"):
        load_checkpoint(path, model=model)
    assert fingerprint(model) == before
    assert [problem.kind for problem in validate_checkpoint(path)] == ["damaged"]


def test_zip_file_without_checksums_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(build(2)[0].state_dict(), path)
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive, pytest.raises(zipfile.BadZipFile):
        archive.read(archive.namelist()[0])
    assert validate_checkpoint(path, build(1)[0]) == []


class Trap:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = str(trace)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.trace,)


def test_code_in_a_pickle_is_never_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save({"model": {}, "trap": Trap(trace)}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Trap(trace)))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Trap(trace)))
    for name in ("a.pt", "b.pt", "c"):
        (problem,) = validate_checkpoint(tmp_path / name)
        assert problem.kind == "unreadable"
        with pytest.raises(CheckpointError):
            load_checkpoint(tmp_path / name)
    assert not trace.exists()


def test_pickled_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    torch.save(build(1)[0], tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"weights_only=True allows.*Save state_dict"):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("content", [torch.ones(3), [1, 2], {"a": 1, "b": {"c": "d"}}])
def test_file_without_a_model_says_so(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "a.pt")
    (problem,) = validate_checkpoint(tmp_path / "a.pt")
    assert problem.kind == "unreadable"
    assert "\n" not in problem.message


class Remembering(nn.Linear):
    seen: Any = None

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_extra_state_of_modules_in_a_state_dict(tmp_path: Path, prefix: str) -> None:
    model = nn.Sequential(Remembering(2, 2))
    model[0].seen = 5
    state = {prefix + name: value for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "a.pt")
    other = nn.Sequential(Remembering(2, 2))
    load_checkpoint(tmp_path / "a.pt", model=other)
    assert other[0].seen == 5
    with pytest.raises(CheckpointError, match=r"model\.0\._extra_state: has no place"):
        load_checkpoint(tmp_path / "a.pt", model=nn.Sequential(nn.Linear(2, 2)))
    torch.save(nn.Sequential(nn.Linear(2, 2)).state_dict(), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"model\.0\._extra_state: is not in the file"):
        load_checkpoint(tmp_path / "a.pt", model=other)


def foreign_files(folder: Path) -> Iterator[tuple[Path, Path]]:
    """A checkpoint of each kind, with the file of it that gets damaged."""
    model, optimizer, _ = build(2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    save_file(model.state_dict(), folder / "a.safetensors")
    for name in ("zip.pt", "old.pt", "a.safetensors"):
        yield folder / name, folder / name
    hf_folder(folder / "hf", sharded=True)
    yield folder / "hf", folder / "hf" / "model.safetensors.index.json"
    dcp_folder(folder / "dcp")
    yield folder / "dcp", folder / "dcp" / ".metadata"
    yield folder / "dcp", next((folder / "dcp").glob("*.distcp"))


def test_damaged_files_of_others_give_no_other_error_than_ours(tmp_path: Path) -> None:
    generator = random.Random(0)
    for checkpoint, file in foreign_files(tmp_path):
        good = file.read_bytes()
        for number in range(DAMAGES):
            data = bytearray(good)
            for _ in range(number % 3 + 1):
                data[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
            file.write_bytes(data[: generator.randrange(len(good))] if number % 4 == 0 else data)
            model = build(1)[0]
            before = fingerprint(model)
            try:
                load_checkpoint(checkpoint, model=model)
            except CheckpointError:
                assert fingerprint(model) == before
            validate_checkpoint(checkpoint, model)
        file.write_bytes(good)
        assert validate_checkpoint(checkpoint) == []


# safetensors and Hugging Face


def test_safetensors_file(tmp_path: Path) -> None:
    path, model = tmp_path / "model.safetensors", build(1)[0]
    save_file(build(2)[0].state_dict(), path, metadata={"format": "pt"})
    loaded = load_checkpoint(path, model=model)
    assert loaded.layout == "safetensors"
    assert values_only(fingerprint(model)) == values_only(fingerprint(build(2)[0]))


@pytest.mark.parametrize(("start", "size"), [(4, 8), (12, 16)], ids=["overlap", "gap"])
def test_every_byte_of_a_file_belongs_to_one_tensor(start: int, size: int) -> None:
    described = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [start, start + 4]},
    }
    raw = bytes(8) + json.dumps(described).encode()
    with pytest.raises(CheckpointError, match="overlap or leave a gap at b"):
        parse(raw, len(raw) + size)


def test_name_that_comes_twice_in_a_header_is_refused() -> None:
    entry = '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    raw = bytes(8) + f"{{{entry}, {entry}}}".encode()
    with pytest.raises(CheckpointError, match="header"):
        parse(raw, len(raw) + 4)


def test_ours_is_a_safetensors_file(tmp_path: Path) -> None:
    model, optimizer, _ = build(2)
    path = save_checkpoint(tmp_path / "a.ckpt", model=model, optimizer=optimizer)
    assert path is not None
    tensors = load_file(path)
    for name, value in model.state_dict().items():
        assert torch.equal(tensors[f"model.{name}"], value)


def hf_folder(folder: Path, *, sharded: bool, extension: str = "safetensors") -> None:
    folder.mkdir()
    model, optimizer, scheduler = build(2)
    state = model.state_dict()
    names = list(state)
    base = "model" if extension == "safetensors" else "pytorch_model"
    write = save_file if extension == "safetensors" else torch.save
    halves = [names[:3], names[3:]] if sharded else [names]
    files = [f"{base}-{i}.{extension}" if sharded else f"{base}.{extension}" for i in range(2)]
    for file, half in zip(files, halves, strict=False):
        write({name: state[name] for name in half}, folder / file)
    if sharded:
        index = {n: file for file, half in zip(files, halves, strict=True) for n in half}
        content = json.dumps({"metadata": {}, "weight_map": index})
        (folder / f"{base}.{extension}.index.json").write_text(content)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")


@pytest.mark.parametrize("extension", ["safetensors", "bin"])
@pytest.mark.parametrize("sharded", [False, True])
def test_hugging_face_folder(tmp_path: Path, sharded: bool, extension: str) -> None:
    folder = tmp_path / "checkpoint-7"
    hf_folder(folder, sharded=sharded, extension=extension)
    assert validate_checkpoint(folder) == []
    model, optimizer, scheduler = build(1)
    load_checkpoint(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    for mine, theirs in zip((model, optimizer, scheduler), build(2), strict=True):
        assert values_only(fingerprint(mine)) == values_only(fingerprint(theirs))


def test_folder_of_accelerate_and_the_step_of_a_trainer(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-7"
    hf_folder(folder, sharded=False)
    for name in ("optimizer", "scheduler"):
        (folder / f"{name}.pt").rename(folder / f"{name}.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    model, optimizer, scheduler = build(1)
    loaded = load_checkpoint(folder, model=model, optimizer=optimizer, scheduler=scheduler)
    assert (loaded.layout, loaded.step) == ("huggingface", 7)
    assert values_only(fingerprint(optimizer)) == values_only(fingerprint(build(2)[1]))


def test_shards_that_are_missing_or_incomplete(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    hf_folder(folder, sharded=True)
    index = folder / "model.safetensors.index.json"
    state = load_file(folder / "model-1.safetensors")
    lost = next(iter(state))
    save_file(
        {name: value for name, value in state.items() if name != lost},
        folder / "model-1.safetensors",
    )
    (problem,) = validate_checkpoint(index)
    assert (problem.kind, problem.key) == ("missing", lost)
    (folder / "model-1.safetensors").unlink()
    (problem,) = validate_checkpoint(index)
    assert problem.kind == "unreadable"
    assert "model-1.safetensors" in problem.message


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd"])
def test_index_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    (problem,) = validate_checkpoint(index)
    assert "is not in its folder" in problem.message


@pytest.mark.parametrize(
    "header",
    [
        {"__metadata__": {"stayfinite": "1"}},
        {"__metadata__": {"stayfinite": "1", "state": "{}"}},
        {"__metadata__": ["stayfinite"]},
        {"__metadata__": "stayfinite"},
        {"stayfinite.seal": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}},
        {"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}},
        {"a": {"dtype": ["U8"], "shape": [0], "data_offsets": [0, 0]}},
        {"a": {"dtype": "U8", "shape": [2**70], "data_offsets": [0, 2**70]}},
        [],
        {"a": 3},
    ],
)
def test_header_that_means_nothing_is_one_line(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(len(text).to_bytes(8, "little") + text)
    (problem,) = validate_checkpoint(tmp_path / "a")
    assert problem.kind == "unreadable"
    assert "\n" not in problem.message


def test_damaged_header_of_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(2)}, path)
    good = path.read_bytes()
    for change in (
        good[:-4],
        good + b"x",
        good.replace(b'"F32"', b'"X32"'),
        good.replace(b"[4]", b"[5]"),
        good.replace(b'"a"', b'"b"'),
        good[:8] + b"[" + good[9:],
    ):
        path.write_bytes(change)
        (problem,) = validate_checkpoint(path)
        assert problem.kind == "unreadable"


def test_non_persistent_buffers_are_not_expected_of_others(tmp_path: Path) -> None:
    class Rotary(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("inv_freq", torch.ones(3), persistent=False)
            self.original_inv_freq = self.inv_freq

    model = Rotary()
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    assert load_checkpoint(tmp_path / "a.safetensors", model=Rotary()).warnings == ()


# torch.distributed.checkpoint


def dcp_folder(folder: Path) -> Path:
    model, optimizer, _ = build(2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_dcp_folder(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "dcp")
    assert validate_checkpoint(folder) == []
    model, optimizer, _ = build(1)
    loaded = load_checkpoint(folder, model=model, optimizer=optimizer)
    assert (loaded.layout, loaded.step) == ("dcp", 7)
    assert values_only(fingerprint(model)) == values_only(fingerprint(build(2)[0]))
    expected = build(2)[1].state_dict()
    found = optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for number, state in expected["state"].items():
        assert all(torch.equal(found["state"][number][key], state[key]) for key in state)


def test_order_of_parameters_in_a_dcp_folder_is_compared(tmp_path: Path) -> None:
    model, optimizer, _ = build(2)
    parts: Any = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": parts[0], "optimizer": parts[1]}
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other, same, _ = build(1)
    load_checkpoint(tmp_path / "dcp", model=other, optimizer=same)
    first = next(iter(same.state.values()))["exp_avg"]
    assert torch.equal(first, next(iter(optimizer.state.values()))["exp_avg"])
    turned = torch.optim.Adam(reversed(list(other.parameters())))
    with pytest.raises(CheckpointError, match="the order has changed"):
        load_checkpoint(tmp_path / "dcp", model=other, optimizer=turned)


def test_dcp_folder_with_parts_of_several_ranks(tmp_path: Path) -> None:
    """Two ranks that each wrote half of a tensor, as fully sharded training does."""
    from torch.distributed.checkpoint import metadata as m

    folder = dcp_folder(tmp_path / "dcp")
    found = pickle.loads((folder / ".metadata").read_bytes())
    entry = found.state_dict_metadata["model.0.weight"]
    size = torch.Size([8, 3])
    second = m.ChunkStorageMetadata(offsets=torch.Size([4, 0]), sizes=torch.Size([4, 3]))
    entry.size, entry.chunks = size, [*entry.chunks, second]
    place = next(i for i in found.storage_data if i.fqn == "model.0.weight")
    again = m.MetadataIndex("model.0.weight", torch.Size([4, 0]), 1)
    found.storage_data[again] = found.storage_data[place]
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    weight = load_checkpoint(folder).state["model"]["0.weight"]
    expected = build(2)[0][0].weight
    assert torch.equal(weight, torch.cat([expected, expected]).detach())
    entry.chunks = entry.chunks[:1]
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    (problem,) = validate_checkpoint(folder)
    assert "a part of model.0.weight is missing" in problem.message


def test_damaged_dcp_folder_is_one_line(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "dcp")
    data = next(folder.glob("*.distcp"))
    good = data.read_bytes()
    for change in (good[: len(good) // 2], bytes(len(good))):
        data.write_bytes(change)
        (problem,) = validate_checkpoint(folder)
        assert problem.kind == "unreadable"
        assert "\n" not in problem.message
    data.unlink()
    (problem,) = validate_checkpoint(folder)
    assert problem.kind == "unreadable"
    (folder / ".metadata").write_bytes(b"rubbish")
    (problem,) = validate_checkpoint(folder)
    assert "metadata is damaged" in problem.message


def test_folder_without_a_checkpoint(tmp_path: Path) -> None:
    (problem,) = validate_checkpoint(tmp_path)
    assert "a folder without" in problem.message
