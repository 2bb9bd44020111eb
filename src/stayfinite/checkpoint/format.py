"""The file format: the safetensors layout with a seal, and its checksums."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128_digest

from stayfinite.detect.memory import float_parts, pieces
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
class TensorEntry:
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
    entries: tuple[TensorEntry, ...]


def build(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Header:
    """The header for these tensors, largest elements first so that all of them are aligned."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        stop = offset + tensor.numel() * tensor.dtype.itemsize
        described[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(described, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(
            f"the state besides tensors takes {len(text):,} bytes as JSON, and {LONGEST_HEADER:,} "
            "are possible. Store long lists of numbers as tensors."
        )
    raw = len(text).to_bytes(8, "little") + text
    return parse(raw, len(raw) + offset)


def parse(raw: bytes, size: int) -> Header:
    """The header in these bytes, of a file of this size; CheckpointError where it is not sound."""
    try:
        described = json.loads(raw[8:].decode(), object_pairs_hook=without_repeats)
        metadata = dict(described.pop("__metadata__", None) or {})
        entries = [_entry(name, each, len(raw)) for name, each in described.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError("its header is not that of a safetensors file.") from error
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    at = len(raw)
    for entry in entries:  # every byte belongs to one tensor
        if entry.start != at:
            raise CheckpointError(f"its tensors overlap or leave a gap at {entry.name}.")
        at = entry.stop
    if at != size:
        missing = "it was cut off" if size < at else "something was added"
        raise CheckpointError(f"it has {size:,} bytes and its header says {at:,}: {missing}.")
    return Header(raw=raw, metadata=metadata, entries=tuple(entries))


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ValueError where a name comes twice in it."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name comes twice")
    return result


def _entry(name: str, described: Any, begin: int) -> TensorEntry:
    dtype = DTYPES[described["dtype"]]
    shape = tuple(described["shape"])
    start, stop = described["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(name)
    if stop - start != math.prod(shape) * dtype.itemsize:  # torch's own product wraps around
        raise ValueError(name)
    return TensorEntry(name=name, dtype=dtype, shape=shape, start=begin + start, stop=begin + stop)


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes as a 1-d uint8 tensor on the CPU, shared where possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


Bytes = NDArray[np.uint8]

PIECE = 1 << 22
"""Bytes that are read and digested at a time; a part of the format."""


def pieces_of(data: Bytes) -> Iterator[Bytes]:
    """The pieces that are digested one by one, at least one."""
    for start in range(0, max(1, len(data)), PIECE):
        yield data[start : start + PIECE]


def joint_digest(digests: Iterable[bytes]) -> bytes:
    """The digest of a tensor, from those of its pieces."""
    return xxh3_128_digest(b"".join(digests))


def digest(data: Bytes) -> bytes:
    """The checksum of a tensor's bytes."""
    return joint_digest(xxh3_128_digest(piece.data) for piece in pieces_of(data))


# Our own files: a safetensors file whose last tensor is the seal.
#
# The seal holds a stamp for each tensor in the order of the file: its digest, and what its values
# are. Then come the digest over the header and all stamps, and a mark. So every byte of the file
# is under a digest, and who has compared those need not look at the values again.

FORMAT = 2
MARK = f"stayfinite seal{FORMAT}".encode()
SEAL = "stayfinite.seal"
_STAMP = struct.Struct("<16sddQ")


class Stamp(NamedTuple):
    """What the seal says of one tensor."""

    digest: bytes
    tally: Tally

    def packed(self) -> bytes:
        kinds = (self.tally.has_nan, self.tally.has_pos_inf, self.tally.has_neg_inf)
        bits = sum(is_there << bit for bit, is_there in enumerate(kinds))
        return _STAMP.pack(self.digest, self.tally.low, self.tally.high, bits)


def seal_of(raw: bytes, stamps: bytes) -> bytes:
    """The content of the seal, for the bytes of a header and the stamps of all tensors."""
    return stamps + xxh3_128_digest(raw + stamps) + MARK


def sealed_pieces(
    tensors: Mapping[str, Tensor], tallies: Mapping[str, Tally], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    """The bytes of a sealed file, piece by piece, ready to be written."""
    size = len(seal_of(b"", bytes(_STAMP.size * len(tensors))))
    placeholder = torch.empty(size, dtype=torch.uint8, device="meta")
    header = build({**tensors, SEAL: placeholder}, {"stayfinite": str(FORMAT), **metadata})
    yield memoryview(header.raw)
    stamps = []
    for entry in header.entries[:-1]:
        digests = []
        for piece in pieces_of(bytes_of(tensors[entry.name]).numpy()):
            digests.append(xxh3_128_digest(piece.data))
            yield piece.data
        stamps.append(Stamp(joint_digest(digests), tallies[entry.name]).packed())
    yield memoryview(seal_of(header.raw, b"".join(stamps)))


Read = Callable[[int, int], bytes]
"""Gives the bytes of a file from a first to before a last one."""


def read_header(read: Read, size: int) -> tuple[Header, bool]:
    """The header of a file of this size, unverified, and whether the file is one of ours."""
    prefix = read(0, min(8, size))
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(LONGEST_HEADER, size - 8):
        raise CheckpointError("it has no safetensors header, or was cut off.")
    header = parse(read(0, 8 + length), size)
    names = {entry.name for entry in header.entries}
    tail = read(max(0, size - len(MARK)), size)
    # Any one of the marks says so, since one may be damaged.
    return header, "stayfinite" in header.metadata or SEAL in names or tail == MARK


def stored_stamps(header: Header, read: Read) -> list[Stamp]:
    """The stamps of the tensors before the seal; CheckpointError if header or seal changed."""
    version = header.metadata.get("stayfinite")
    last = header.entries[-1] if header.entries else None
    if last is None or last.name != SEAL or version is None:
        raise CheckpointError("its header was damaged: the checksums are not where they must be.")
    content = read(last.start, last.stop)
    stamps = content[: _STAMP.size * (len(header.entries) - 1)]
    is_right = content == seal_of(header.raw, stamps)
    if version != str(FORMAT) and (is_right or not content.endswith(MARK)):
        raise CheckpointError(
            f"it has format {version}, and this version of stayfinite reads format {FORMAT}. "
            + (
                "Load it with the version that saved it."
                if version == "1"
                else "Update stayfinite."
            )
        )
    if not is_right:
        raise CheckpointError("its header or its checksums were damaged.")
    found = []
    for digest, low, high, bits in _STAMP.iter_unpack(stamps):
        nan, pos_inf, neg_inf = (bool(bits >> bit & 1) for bit in range(3))
        tally = Tally(low=low, high=high, has_nan=nan, has_pos_inf=pos_inf, has_neg_inf=neg_inf)
        found.append(Stamp(digest, tally))
    return found


_DIRECT = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_AT_ONCE = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """The extremes of the finite values, and which non-finite kinds there are."""

    low: float = math.inf
    high: float = -math.inf
    has_nan: bool = False
    has_pos_inf: bool = False
    has_neg_inf: bool = False

    @property
    def is_finite(self) -> bool:
        return not (self.has_nan or self.has_pos_inf or self.has_neg_inf)

    @property
    def has_finite(self) -> bool:
        """Whether there is any finite float; not so for integers and empty tensors."""
        return self.low <= self.high

    @property
    def largest(self) -> float:
        """The largest finite magnitude; 0 when there is none."""
        return max(abs(self.low), abs(self.high)) if self.has_finite else 0.0

    @property
    def words(self) -> str:
        """Which non-finite kinds there are."""
        kinds = {"NaN": self.has_nan, "+Inf": self.has_pos_inf, "-Inf": self.has_neg_inf}
        return " and ".join(name for name, is_there in kinds.items() if is_there)


def tally(tensor: Tensor) -> Tally:
    """The tally of a tensor of any dtype and layout."""
    found: list[Tally] = []
    for part in float_parts(tensor.detach()):
        is_direct = part.dtype in _DIRECT
        if is_direct and part.is_contiguous():
            found.append(_of_reals(part))
        else:  # piece by piece, so that there is never a copy of the whole
            each = (piece for _, piece in pieces(part, _AT_ONCE))
            found += (_of_reals(piece if is_direct else piece.float()) for piece in each)
    return join_tallies(found)


def join_tallies(tallies: Iterable[Tally]) -> Tally:
    """The tally of all of them."""
    known = list(tallies)
    if len(known) == 1:
        return known[0]
    return Tally(
        low=min((each.low for each in known), default=math.inf),
        high=max((each.high for each in known), default=-math.inf),
        has_nan=any(each.has_nan for each in known),
        has_pos_inf=any(each.has_pos_inf for each in known),
        has_neg_inf=any(each.has_neg_inf for each in known),
    )


def _of_reals(values: Tensor) -> Tally:
    if not values.numel():
        return Tally()
    low, high = (extreme.item() for extreme in values.aminmax())  # host sync
    if math.isfinite(low) and math.isfinite(high):
        return Tally(low=low, high=high)
    finite = _of_reals(values[values.isfinite()])
    return Tally(
        low=finite.low,
        high=finite.high,
        has_nan=bool(values.isnan().any()),
        has_pos_inf=bool(values.isposinf().any()),
        has_neg_inf=bool(values.isneginf().any()),
    )
