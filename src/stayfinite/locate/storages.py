"""What is known about memory: which storages hold bad values, and since which event."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Known = TypeVar("Known")


class StorageMap(Generic[Known]):
    """A value per living storage; an entry ends with its memory, as addresses are used again."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, Known]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, tensor: Tensor) -> Known | None:
        if not self._entries:
            return None
        key = _key(tensor)
        entry = self._entries.get(key) if key is not None else None
        if entry is None or key is None:
            return None
        if entry[0].expired():
            del self._entries[key]
            return None
        return entry[1]

    def put(self, tensor: Tensor, known: Known) -> None:
        memory = _memory(tensor)
        if memory is not None:
            if len(self._entries) >= 4096 and len(self._entries) & (len(self._entries) - 1) == 0:
                self._sweep()
            self._entries[memory._cdata] = StorageWeakRef(memory), known

    def drop(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key is not None:
            self._entries.pop(key, None)

    def _sweep(self) -> None:
        self._entries = {k: e for k, e in self._entries.items() if not e[0].expired()}


def covers_storage(tensor: Tensor) -> bool:
    """Whether the tensor is the whole of its memory."""
    try:
        return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return False


def _key(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        memory = _memory(tensor)
        return None if memory is None else memory._cdata


def _memory(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of a sparse one the values have; wrappers: none
        return tensor._values().untyped_storage() if tensor.layout is torch.sparse_coo else None
