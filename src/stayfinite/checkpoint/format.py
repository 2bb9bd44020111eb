"""The file format: the safetensors layout with a seal, and its checksums."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


# The checksum of a tensor's bytes, at the speed of memory.
#
# Bytes are cut into pieces of 64 rows of 2039 little-endian 64-bit words. Of each piece the sums
# of the columns, modulo 2^64, and the bytes that fill no row go through SHA-256; the digest of a
# tensor is the SHA-256 of those of its pieces. A change within 16,304 bytes in a row touches no
# column twice, so it is always seen. 2039 is odd, so sectors that change places are never in the
# same columns, and are seen too. A CRC-32 gives less, and is slower: benchmarks/checkpoint.py.

Bytes = NDArray[np.uint8]

SIZE = 16
"""Bytes of a digest."""

WORDS = 2039
ROW = 8 * WORDS
PIECE = 64 * ROW


def pieces_of(data: Bytes) -> Iterator[Bytes]:
    """The pieces that are digested one by one, at least one."""
    for start in range(0, max(1, len(data)), PIECE):
        yield data[start : start + PIECE]


def piece_digest(data: Bytes) -> bytes:
    """The digest of one piece."""
    whole = len(data) // ROW * ROW
    hashed = hashlib.sha256()
    if whole:
        sums = np.add.reduce(data[:whole].view("<u8").reshape(-1, WORDS), axis=0)
        hashed.update(sums.data)
    hashed.update(data[whole:].data)
    return hashed.digest()[:SIZE]


def joint_digest(parts: Iterable[bytes]) -> bytes:
    """One digest over plain bytes: digests of pieces, or a header and what is known of the rest."""
    return hashlib.sha256(b"".join(parts)).digest()[:SIZE]


def digest(data: Bytes) -> bytes:
    """The digest of a tensor's bytes."""
    return joint_digest(map(piece_digest, pieces_of(data)))


# Our own files: a safetensors file whose last tensor is the seal.
#
# The seal holds a stamp for each tensor in the order of the file: its digest, and what its values
# are. Then come the digest over the header and all stamps, and a mark. So every byte of the file
# is under a digest, and who has compared those need not look at the values again.

FORMAT = "1"
MARK = b"stayfinite seal1"
SEAL = "stayfinite.seal"
_STAMP = struct.Struct(f"<{SIZE}sddQ")


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What the seal says of one tensor."""

    digest: bytes
    tally: Tally

    def packed(self) -> bytes:
        kinds = (self.tally.has_nan, self.tally.has_pos_inf, self.tally.has_neg_inf)
        bits = sum(is_there << bit for bit, is_there in enumerate(kinds))
        return _STAMP.pack(self.digest, self.tally.low, self.tally.high, bits)

    @classmethod
    def unpacked(cls, content: bytes) -> Self:
        digest, low, high, bits = _STAMP.unpack(content)
        nan, pos_inf, neg_inf = (bool(bits >> bit & 1) for bit in range(3))
        tally = Tally(low=low, high=high, has_nan=nan, has_pos_inf=pos_inf, has_neg_inf=neg_inf)
        return cls(digest=digest, tally=tally)


def sealed_pieces(
    tensors: Mapping[str, Tensor], tallies: Mapping[str, Tally], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    """The bytes of a sealed file, piece by piece, ready to be written."""
    size = _STAMP.size * len(tensors) + SIZE + len(MARK)
    placeholder = torch.empty(size, dtype=torch.uint8, device="meta")
    header = build({**tensors, SEAL: placeholder}, {"stayfinite": FORMAT, **metadata})
    yield memoryview(header.raw)
    stamps = []
    for entry in header.entries[:-1]:
        digests = []
        for piece in pieces_of(bytes_of(tensors[entry.name]).numpy()):
            digests.append(piece_digest(piece))
            yield piece.data
        stamps.append(Stamp(digest=joint_digest(digests), tally=tallies[entry.name]).packed())
    yield memoryview(_seal(header, b"".join(stamps)))


def _seal(header: Header, stamps: bytes) -> bytes:
    return stamps + joint_digest([header.raw, stamps]) + MARK


def is_sealed(header: Header, tail: bytes) -> bool:
    """Whether the file is one of ours; any one of its marks says so, since one may be damaged."""
    names = {entry.name for entry in header.entries}
    return "stayfinite" in header.metadata or SEAL in names or tail == MARK


def stored_stamps(header: Header, read: Callable[[int, int], bytes]) -> list[Stamp]:
    """The stamps of the tensors before the seal; CheckpointError if header or seal changed."""
    version = header.metadata.get("stayfinite")
    last = header.entries[-1] if header.entries else None
    if last is None or last.name != SEAL or version is None:
        raise CheckpointError("its header was damaged: the checksums are not where they must be.")
    content = read(last.start, last.stop)
    stamps = content[: _STAMP.size * (len(header.entries) - 1)]
    if content != _seal(header, stamps):
        raise CheckpointError("its header or its checksums were damaged.")
    if version != FORMAT:
        raise CheckpointError(
            f"it has format {version}, and this version of stayfinite reads format {FORMAT}. "
            "Update stayfinite."
        )
    starts = range(0, len(stamps), _STAMP.size)
    return [Stamp.unpacked(stamps[start : start + _STAMP.size]) for start in starts]


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
    return together(
        _of_reals(piece if part.dtype in _DIRECT else piece.float())
        for part in float_parts(tensor.detach())
        for piece in _few(part)
    )


def together(tallies: Iterable[Tally]) -> Tally:
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


def _few(part: Tensor) -> Iterable[Tensor]:
    """As few pieces as can be looked at without a copy of the whole."""
    if part.dtype in _DIRECT and part.is_contiguous():
        return [part]
    return (piece for _, piece in pieces(part, _AT_ONCE))


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
