"""The safetensors layout: 8 bytes of length, a JSON header, and the tensors one after another."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stayfinite.errors import CheckpointError

LONGEST_HEADER = 100_000_000
"""What the safetensors library accepts."""

DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a file; `start` and `stop` count from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a file: `raw` are its bytes, entries are in the order of the file."""

    raw: bytes
    metadata: Mapping[str, str]
    entries: tuple[Entry, ...]


def build(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Header:
    """The header for these tensors, largest elements first so that all of them are aligned."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    entries, offset = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        stop = offset + tensor.numel() * tensor.dtype.itemsize
        shape = list(tensor.shape)
        described[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [offset, stop],
        }
        entries.append((name, tensor.dtype, tuple(shape), offset, stop))
        offset = stop
    text = json.dumps(described, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(
            f"the state besides tensors takes {len(text):,} bytes as JSON, and {LONGEST_HEADER:,} "
            "are possible. Store long lists of numbers as tensors."
        )
    raw = len(text).to_bytes(8, "little") + text
    return Header(raw=raw, metadata=metadata, entries=_from_file_start(entries, len(raw)))


def _from_file_start(
    entries: Iterable[tuple[str, torch.dtype, tuple[int, ...], int, int]], begin: int
) -> tuple[Entry, ...]:
    return tuple(
        Entry(name=name, dtype=dtype, shape=shape, start=begin + start, stop=begin + stop)
        for name, dtype, shape, start, stop in entries
    )


def header_length(prefix: bytes, size: int) -> int:
    """The length of the JSON that follows the first 8 bytes of a file of this size."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(LONGEST_HEADER, size - 8):
        raise CheckpointError("it has no safetensors header, or was cut off.")
    return length


def parse(raw: bytes, size: int) -> Header:
    """The header in these bytes, of a file of this size; CheckpointError where it is not sound."""
    try:
        described = json.loads(raw[8:].decode(), object_pairs_hook=_without_repeats)
        metadata = dict(described.pop("__metadata__", None) or {})
        found = [_entry(name, each) for name, each in described.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError("its header is not that of a safetensors file.") from error
    entries = _from_file_start(sorted(found, key=lambda each: each[3:]), len(raw))
    _check_coverage(entries, len(raw), size)
    return Header(raw=raw, metadata=metadata, entries=entries)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name comes twice")
    return result


def _entry(name: str, described: Any) -> tuple[str, torch.dtype, tuple[int, ...], int, int]:
    dtype = DTYPES[described["dtype"]]
    shape = tuple(described["shape"])
    start, stop = described["data_offsets"]
    numbers = (*shape, start, stop)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(name)
    if stop - start != math.prod(shape) * dtype.itemsize:  # torch's own product wraps around
        raise ValueError(name)
    return name, dtype, shape, start, stop


def _check_coverage(entries: tuple[Entry, ...], begin: int, size: int) -> None:
    """Every byte belongs to one tensor."""
    for entry in entries:
        if entry.start != begin:
            raise CheckpointError(f"its tensors overlap or leave a gap at {entry.name}.")
        begin = entry.stop
    if begin != size:
        missing = "it was cut off" if size < begin else "something was added"
        raise CheckpointError(f"it has {size:,} bytes and its header says {begin:,}: {missing}.")


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes as a 1-d uint8 tensor on the CPU, shared where possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)
