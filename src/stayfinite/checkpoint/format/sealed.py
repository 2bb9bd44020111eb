"""Our own files: a safetensors file whose last tensor is the seal, the checksums of the rest.

The seal holds the digest of each tensor in the order of the file, then the digest over the header
and all of these, then a mark. So every byte of the file is under a digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from stayfinite.checkpoint.format.digests import SIZE, Digest, joint_digest
from stayfinite.checkpoint.format.layout import Entry, Header, build, bytes_of
from stayfinite.errors import CheckpointError

FORMAT = "1"
MARK = b"stayfinite seal1"
SEAL = "stayfinite.seal"
PIECE = 1 << 20


def sealed_pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    """The bytes of a sealed file, piece by piece, ready to be written."""
    size = SIZE * (len(tensors) + 1) + len(MARK)
    placeholder = torch.empty(size, dtype=torch.uint8, device="meta")
    header = build({**tensors, SEAL: placeholder}, {"stayfinite": FORMAT, **metadata})
    yield memoryview(header.raw)
    digests = []
    for entry in header.entries[:-1]:
        digest, data = Digest(), bytes_of(tensors[entry.name])
        for start in range(0, data.numel(), PIECE):
            piece = data[start : start + PIECE]
            digest.update(piece)
            yield piece.numpy().data
        digests.append(digest.value())
    yield memoryview(seal(header, digests))


def seal(header: Header, digests: list[bytes]) -> bytes:
    return b"".join([*digests, joint_digest([header.raw, *digests]), MARK])


def is_sealed(header: Header, tail: bytes) -> bool:
    """Whether the file is one of ours; any one of its marks says so, since one may be damaged."""
    names = {entry.name for entry in header.entries}
    return "stayfinite" in header.metadata or SEAL in names or tail == MARK


def stored_digests(header: Header, read: Callable[[Entry], bytes]) -> list[bytes]:
    """The digests of the tensors before the seal; CheckpointError if header or seal changed."""
    version = header.metadata.get("stayfinite")
    last = header.entries[-1]
    if last.name != SEAL or version is None:
        raise CheckpointError("its header was damaged: the checksums are not where they must be.")
    count = len(header.entries) - 1
    content = read(last)
    digests = [content[i * SIZE : (i + 1) * SIZE] for i in range(count)]
    if content != seal(header, digests):
        raise CheckpointError("its header or its checksums were damaged.")
    if version != FORMAT:
        raise CheckpointError(
            f"it has format {version}, and this version of stayfinite reads format {FORMAT}. "
            "Update stayfinite."
        )
    return digests
