"""Folders of torch.distributed.checkpoint, ours and others', read by each process for itself.

Their .metadata is a pickle. It is read by an unpickler that knows the few classes which belong
there and nothing else, and the python values in the folder with weights_only=True.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from stayfinite.checkpoint.foreign import contents_of_sections
from stayfinite.checkpoint.values import Contents, dtype_named, hold, hold_all, own_contents
from stayfinite.distributed import rank, world_size
from stayfinite.errors import CheckpointError

TREE = "stayfinite.state"
"""The key of the JSON tree, by which a folder of ours is known."""

RANDOM = "random."
"""Before a rank's number: its random number generators."""

FORMAT = 1

_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
        if hasattr(metadata, name)
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PureWindowsPath,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return dtype_named(name)
        raise CheckpointError(f"its metadata asks for {module}.{name}, which has no place there.")


class _FolderReader(filesystem.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        found = _metadata_of(Path(self.path))
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        return found


class _Planner(DefaultLoadPlanner):
    """Makes room for what the folder has, and of what is sharded here for this rank's part only."""

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._shards = shards

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        is_ours = TREE in metadata.state_dict_metadata
        mine = f"{RANDOM}{rank()}"
        for key, item in metadata.state_dict_metadata.items():
            if is_ours and key.startswith(RANDOM) and key.split(".")[:2] != mine.split("."):
                continue  # another rank's
            is_tensor = isinstance(item, TensorStorageMetadata)
            # What torch's own planner for an empty dict does; only whole tensors know that one.
            path = (metadata.planner_data or {}).get(key, (key,))
            set_element(state_dict, path, self._room(key, item) if is_tensor else item)
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def _room(self, key: str, item: TensorStorageMetadata) -> Tensor:
        size, dtype = torch.Size(item.size), item.properties.dtype
        _, is_state, name = key.partition(".state.")
        names = (key, f"model.{key}", f"model.{name.rpartition('.')[0]}" if is_state else "")
        found: Any = next((self._shards[name] for name in names if name in self._shards), None)
        if found is None or found.shape != size:
            return torch.empty(size, dtype=dtype)
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            torch.empty_like(found.to_local(), dtype=dtype),
            found.device_mesh,
            found.placements,
            run_check=False,
            shape=size,
            stride=found.stride(),
        )

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        trusted = io.BytesIO()
        torch.save(loaded, trusted)  # the method above loads without any care
        trusted.seek(0)
        super().load_bytes(read_item, trusted)


def open_dcp(path: Path, shards: Mapping[str, Tensor]) -> Contents:
    """What the folder holds; `shards` are the DTensors that it is loaded into, by name."""
    state = read_dcp(path, shards)
    if TREE not in state:
        return contents_of_sections(hold_all(state, "file"), layout="dcp")
    random = state.pop(f"{RANDOM}{rank()}", None)
    tensors = {
        key.replace(f"{RANDOM}{rank()}", RANDOM[:-1], 1) if key.startswith(RANDOM) else key: value
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    try:
        tree = json.loads(state[TREE])
        if tree["format"] != FORMAT:
            raise CheckpointError(
                f"it has format {tree['format']}, and this version of stayfinite reads format "
                f"{FORMAT}. Update stayfinite."
            )
        # With another number of ranks nobody's generators can go on.
        is_same_world = tree["world"] == world_size() and random is not None
        tree["random"] = json.loads(random) if is_same_world else None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError("its state is damaged.") from error
    held = {key: hold(key, tensor) for key, tensor in tensors.items()}
    return replace(own_contents(tree, held), layout="dcp")


def is_complete(path: Path) -> bool:
    """Whether all that .metadata names is there, with as many bytes; the values are not read."""
    try:
        found = _metadata_of(path)
        _require_all_parts(found)
        ends: dict[str, int] = {}
        for place in found.storage_data.values():
            end = place.offset + place.length
            ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
        return all((path / name).stat().st_size >= end for name, end in ends.items())
    except (CheckpointError, OSError, AttributeError, TypeError):
        return False


def read_dcp(path: Path, shards: Mapping[str, Tensor]) -> dict[str, Any]:
    """The saved dict, put together from the parts of all ranks."""
    state: dict[str, Any] = {}
    try:
        _require_all_parts(_metadata_of(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there is known
            # The public load() wants the tensors to load into, which only the folder knows.
            _load_state_dict(
                state, storage_reader=_FolderReader(path), planner=_Planner(shards), no_dist=True
            )
    except (CheckpointError, OSError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1][:200]
        raise CheckpointError(f"its parts cannot be put together: {reason}") from error
    return state


def _require_all_parts(found: metadata.Metadata) -> None:
    """Parts that no rank wrote would be uninitialised memory."""
    for name, item in found.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata):
            parts = sum(torch.Size(chunk.sizes).numel() for chunk in item.chunks)
            if parts < torch.Size(item.size).numel():
                raise CheckpointError(f"a part of {name} is missing: not every rank's was saved.")


def _metadata_of(folder: Path) -> metadata.Metadata:
    try:
        found = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError("its .metadata is damaged.") from error
    if not isinstance(found, metadata.Metadata):
        raise CheckpointError("its .metadata is damaged.")
    return found
