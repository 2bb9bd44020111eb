"""The checksum of a tensor's bytes, at the speed of memory.

Bytes are cut into pieces of 64 rows of 2039 little-endian 64-bit words. Of each piece the sums of
the columns, modulo 2^64, and the bytes that fill no row go through SHA-256; the digest of a tensor
is the SHA-256 of those of its pieces. A change within 16,304 bytes in a row touches no column
twice, so it is always seen. 2039 is odd, so sectors that change places are never in the same
columns, and are seen too. A CRC-32 gives less, and is slower: benchmarks/checkpoint.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

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
