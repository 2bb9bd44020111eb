"""Folders of torch.distributed.checkpoint, read by one process alone.

Their .metadata is a pickle. It is read by an unpickler that knows the few classes which belong
there and nothing else, and the python values in the folder with weights_only=True.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from stayfinite.checkpoint.values import dtype_named
from stayfinite.errors import CheckpointError

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


class _Planner(_EmptyStateDictLoadPlanner):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        trusted = io.BytesIO()
        torch.save(loaded, trusted)  # the method above loads without any care
        trusted.seek(0)
        super().load_bytes(read_item, trusted)


def read_dcp(path: Path) -> dict[str, Any]:
    """The saved dict with whole tensors, put together from the parts of all ranks."""
    state: dict[str, Any] = {}
    try:
        for name, item in _metadata_of(path).state_dict_metadata.items():
            if isinstance(item, TensorStorageMetadata):
                # Parts that no rank wrote would be uninitialised memory.
                parts = sum(torch.Size(chunk.sizes).numel() for chunk in item.chunks)
                if parts < torch.Size(item.size).numel():
                    raise CheckpointError(
                        f"a part of {name} is missing: not every rank's was saved."
                    )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there is known
            # The public load() wants the tensors to load into, which only the folder knows.
            _load_state_dict(
                state, storage_reader=_FolderReader(path), planner=_Planner(), no_dist=True
            )
    except (CheckpointError, OSError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1][:200]
        raise CheckpointError(f"its parts cannot be put together: {reason}") from error
    return state


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
