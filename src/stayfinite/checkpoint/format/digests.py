"""The checksum of a tensor's bytes, at the speed of memory.

Whole grids of 64 x 64 little-endian 64-bit words (32 KiB) are reduced to their row sums and column
sums, modulo 2^64; the sums, and at the end the bytes that fill no grid, go through SHA-256. An
error in one, two or three words of a grid always changes a sum: an unseen one needs four words in
a rectangle that cancel along both axes. A CRC-32 gives less, and is the slower one:
benchmarks/checkpoint.py measures both.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

SIZE = 16
"""Bytes of a digest."""

SIDE = 64
GRID = SIDE * SIDE * 8


class Digest:
    """The digest of bytes that come in pieces; all but the last fill whole grids."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, data: Tensor) -> None:
        """Add a 1-d uint8 tensor on the CPU that begins at a multiple of 8 bytes in memory."""
        whole = data.numel() // GRID * GRID
        if whole:
            grids = data[:whole].view(torch.int64).view(-1, SIDE, SIDE)
            sums = torch.empty(len(grids), 2, SIDE, dtype=torch.int64, device="cpu")
            torch.sum(grids, 2, out=sums[:, 0])
            torch.sum(grids, 1, out=sums[:, 1])
            self._hash.update(sums.numpy().data)
        if whole < data.numel():
            self._hash.update(data[whole:].numpy().data)

    def value(self) -> bytes:
        return self._hash.digest()[:SIZE]


def digest(data: Tensor) -> bytes:
    """The digest of a 1-d uint8 tensor."""
    whole = Digest()
    whole.update(data)
    return whole.value()


def joint_digest(parts: list[bytes]) -> bytes:
    """One digest over plain bytes: a header and the digests of what follows it."""
    return hashlib.sha256(b"".join(parts)).digest()[:SIZE]
