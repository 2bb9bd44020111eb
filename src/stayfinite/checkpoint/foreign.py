"""Files of torch.save and of Hugging Face, read without running any code of theirs."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from stayfinite.checkpoint.modules import canonical_name
from stayfinite.checkpoint.problem import Problem, error
from stayfinite.checkpoint.stream import Reading
from stayfinite.checkpoint.values import Contents, Held, Layout, ModuleRecord, OptimizerRecord
from stayfinite.errors import CheckpointError
from stayfinite.nested import as_tuple

# What people call the parts of a checkpoint; the first that is there counts.
_NAMES = {
    "model": ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network"),
    "optimizer": ("optimizer", "optimizer_states", "optimizer_state_dict", "optim", "opt"),
    "scheduler": ("scheduler", "lr_schedulers", "lr_scheduler", "scheduler_state_dict", "sched"),
    "scaler": ("scaler", "scaler_state_dict", "grad_scaler", "amp", "MixedPrecision"),
    "ema": ("ema", "model_ema", "ema_state_dict", "ema_model"),
    "step": ("step", "global_step", "iteration", "iter"),
}
_EXTRA = "_extra_state"
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def is_torch_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith(_PICKLES)


def read_torch(path: Path, reading: Reading) -> tuple[Any, list[Problem]]:
    """What torch.load gives with weights_only=True, on the CPU; damaged records are problems.

    torch.load itself does not look at the checksums that torch.save wrote.
    """
    try:
        is_zip = zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # of what it takes for an archive on several disks
        is_zip = False
    problems = _damaged_records(path, reading.progress) if is_zip else []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Mapped memory is enough to look through it.
            is_mapped = reading.keep is None and is_zip
            tree = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as failure:
        lines = (line for line in str(failure).splitlines() if "GLOBAL" in line.upper())
        detail = next(lines, "").strip() or _first_line(failure)
        raise CheckpointError(
            "it needs more than weights_only=True allows, which can run code, so it is not read "
            f"({detail}). Save state_dict()s instead of objects."
        ) from failure
    except OSError:
        raise
    except Exception as failure:  # torch raises many kinds for a damaged file
        raise CheckpointError(f"torch.load fails: {_first_line(failure)}") from failure
    return tree, problems


def _first_line(failure: Exception) -> str:
    return (str(failure).strip() or type(failure).__name__).splitlines()[0][:200]


def _damaged_records(path: Path, progress: Callable[[int], None]) -> list[Problem]:
    """Records of a zip file whose checksum differs; none if none was ever written."""
    bad = []
    try:
        with zipfile.ZipFile(path) as archive:
            records = [info for info in archive.infolist() if info.file_size]
            for info in records:
                try:
                    with archive.open(info) as record:
                        while data := record.read(1 << 20):
                            progress(len(data))
                except OSError:
                    raise
                except Exception:  # a wrong checksum, and whatever else damage makes it raise
                    bad.append(info.filename)
    except OSError:
        raise
    except Exception as failure:  # zipfile raises many kinds for a damaged directory
        raise CheckpointError(f"its zip directory is damaged: {_first_line(failure)}") from failure
    if len(bad) == len(records) > 1:  # torch can be told to write no checksums
        return []
    message = "its bytes differ from the zip file's checksum."
    return [error("damaged", name, message) for name in bad]


def module_record(entries: Mapping[Any, Any]) -> ModuleRecord:
    """The record of a state_dict; what modules put there besides tensors has a name of its own."""
    extra = {name: item for name, item in entries.items() if str(name).endswith(_EXTRA)}
    rest = {str(name): item for name, item in entries.items() if name not in extra}
    return ModuleRecord(
        tensors={name: item for name, item in rest.items() if isinstance(item, Held)},
        extra_states={
            str(name).removesuffix(_EXTRA).removesuffix("."): item for name, item in extra.items()
        },
        others=tuple(name for name, item in rest.items() if not isinstance(item, Held)),
    )


def contents_of_sections(tree: Any, *, layout: Layout = "torch") -> Contents:
    """The contents of a saved dict: a state_dict, or one with sections such as "optimizer"."""
    if not isinstance(tree, dict):
        kind = "a tensor" if isinstance(tree, Held) else f"a {type(tree).__name__}"
        raise CheckpointError(f"it holds {kind}; a checkpoint is a dict.")
    if tree and all(_is_entry(name, item) for name, item in tree.items()):
        return Contents(layout=layout, models=(module_record(tree),))
    names = {
        part: next((name for name in choices if tree.get(name) is not None), None)
        for part, choices in _NAMES.items()
    }

    def section(part: str) -> Any:
        return tree.get(names[part])

    model = section("model") if names["model"] else _only_state_dict(tree, names)
    if isinstance(model, dict) and isinstance(model.get("state_dict"), dict):
        model = model["state_dict"]
    if not isinstance(model, dict):
        raise CheckpointError(f"it has no model among {', '.join(map(str, tree))[:200]}.")
    step = section("step")
    return Contents(
        layout="lightning" if "pytorch-lightning_version" in tree else layout,
        models=(module_record(model),),
        optimizers=tuple(
            _optimizer_record(each)
            for each in as_tuple(section("optimizer"))
            if isinstance(each, dict) and "param_groups" in each
        ),
        schedulers=as_tuple(section("scheduler")),
        scaler=section("scaler"),
        averages=as_tuple(section("ema")),
        extra={key: item for key, item in tree.items() if key not in names.values()},
        step=step if isinstance(step, int) else None,
    )


def _is_entry(name: Any, item: Any) -> bool:
    return isinstance(name, str) and (isinstance(item, Held) or name.endswith(_EXTRA))


def _only_state_dict(tree: Mapping[str, Any], names: Mapping[str, str | None]) -> Any:
    """The one section that looks like a state_dict, whatever its name is."""
    found = [
        item
        for name, item in tree.items()
        if name not in names.values()
        and isinstance(item, dict)
        and item
        and all(_is_entry(*each) for each in item.items())
    ]
    return found[0] if len(found) == 1 else None


def _optimizer_record(state_dict: dict[str, Any]) -> OptimizerRecord:
    """The state by the parameter's number, which some layouts make text.

    Layouts of torch.distributed have names where optimizers have numbers.
    """
    state = {
        int(key) if isinstance(key, str) and key.isdigit() else key: item
        for key, item in (state_dict.get("state") or {}).items()
    }
    ids = [each for group in state_dict["param_groups"] for each in group.get("params", ())]
    has_names = ids and all(isinstance(each, str) and not each.isdigit() for each in ids)
    return OptimizerRecord(
        state_dict={**state_dict, "state": state},
        names=tuple(map(canonical_name, ids)) if has_names else None,
    )


_MODELS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "adapter_model.safetensors",
)
_FILES = {
    "model": _MODELS,
    "optimizer": ("optimizer.pt", "optimizer.bin"),
    "scheduler": ("scheduler.pt", "scheduler.bin"),
    "scaler": ("scaler.pt",),
}


def folder_files(folder: Path) -> dict[str, Path]:
    """The files of a checkpoint folder by section; the first of each that is there."""
    there = {
        section: [folder / name for name in names if (folder / name).is_file()]
        for section, names in _FILES.items()
    }
    return {section: files[0] for section, files in there.items() if files}


def step_of(folder: Path) -> int | None:
    """The step that transformers' Trainer noted, if it did."""
    try:
        text = (folder / "trainer_state.json").read_text(encoding="utf-8")
        step = json.loads(text)["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def shards_of(index: Path) -> dict[Path, list[str]]:
    """The names of the tensors in each shard; CheckpointError where the index makes no sense."""
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
        entries = [(str(name), str(file)) for name, file in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise CheckpointError("it is not an index of shards: it has no weight_map.") from failure
    shards: dict[Path, list[str]] = {}
    for name, file in entries:
        if Path(file).name != file:
            raise CheckpointError(f"its index names {file!r}, which is not in its folder.")
        shards.setdefault(index.parent / file, []).append(name)
    return shards
