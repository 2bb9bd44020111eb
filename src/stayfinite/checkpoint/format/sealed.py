"""Our own files: a safetensors file whose last tensor is the seal.

The seal holds a stamp for each tensor in the order of the file: its digest, and what its values
are. Then come the digest over the header and all stamps, and a mark. So every byte of the file is
under a digest, and who has compared those need not look at the values again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from stayfinite.checkpoint.format.digests import SIZE, joint_digest, piece_digest, pieces_of
from stayfinite.checkpoint.format.layout import Header, build, bytes_of
from stayfinite.checkpoint.format.tally import Tally
from stayfinite.errors import CheckpointError

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
