"""Reads safetensors files, ours and others', once from front to end, checking on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from stayfinite.checkpoint.format import (
    PIECE,
    Bytes,
    Header,
    Tally,
    TensorEntry,
    join_tallies,
    joint_digest,
    read_header,
    stored_stamps,
    tally,
)
from stayfinite.checkpoint.problem import Problem, error
from stayfinite.checkpoint.values import Held
from stayfinite.errors import CheckpointError

MOST_THREADS = 4
_WORTH_THREADS = 8 * PIECE


def nothing_told(count: int) -> None:
    """The progress that nobody watches."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read: which tensors stay in memory, whether all get digests, whom to tell of bytes.

    Without `keep` none stays, and a file is only looked through. `scan`: the values of our own
    files are looked at too, though their seal says what they are. `shards` are the DTensors that
    shall be loaded, by name: of those only this rank's part is read, where the layout has parts.
    """

    keep: Callable[[str], bool] | None = None
    digests: bool = False
    scan: bool = False
    progress: Callable[[int], None] = nothing_told
    shards: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SafeFile:
    """What is in one safetensors file; `problems` are tensors that were damaged."""

    header: Header
    is_ours: bool
    held: dict[str, Held]
    problems: list[Problem] = field(default_factory=list)


def read_safetensors(path: Path, reading: Reading) -> SafeFile:
    """The file's tensors, each verified and tallied; CheckpointError when it has no sound header.

    With nothing to keep this needs a few MiB of memory, however large the file is.
    """
    with open_file(path) as file:
        header, is_ours = read_header(file.bytes, file.size)
        reading.progress(len(header.raw))
        if not is_ours:
            found = _tensors(file, header.entries, replace(reading, scan=True))
            held = {each.key: each for each in found}
            return SafeFile(header=header, is_ours=False, held=held)
        stamps = stored_stamps(header, file.bytes)
        found = _tensors(file, header.entries[:-1], replace(reading, digests=True))
    held, damaged = {}, []
    for each, stamp in zip(found, stamps, strict=True):
        held[each.key] = replace(each, tally=stamp.tally)
        # Values that were not looked at, or are stored as bytes, say nothing.
        if each.digest != stamp.digest or each.tally not in (Tally(), stamp.tally):
            message = "its bytes are not those that were saved; the checksum differs. "
            damaged.append(error("damaged", each.key, message + "Load an older generation."))
    return SafeFile(header=header, is_ours=True, held=held, problems=damaged)


def header_of(path: Path) -> tuple[Header, bool]:
    """Only the header, unverified, and whether the file is ours."""
    with open_file(path) as file:
        return read_header(file.bytes, file.size)


class _Part(NamedTuple):
    """A tensor, or a piece of a large one, from start to stop; `place` is where it stays."""

    entry: TensorEntry
    start: int
    stop: int
    place: Bytes | None


def _tensors(file: OpenFile, entries: Sequence[TensorEntry], reading: Reading) -> list[Held]:
    """All these tensors, in their order."""
    keep = reading.keep or (lambda name: False)
    kept = {
        entry.name: torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
        for entry in entries
        if keep(entry.name)
    }
    size = sum(entry.nbytes for entry in entries)
    threads = 1 if size < _WORTH_THREADS else min(MOST_THREADS, os.cpu_count() or 1)
    held: list[Held] = []
    digests: list[bytes] = []
    tallies: list[Tally] = []
    with one_torch_thread() if reading.scan else nullcontext(), ThreadPoolExecutor(threads) as pool:
        look = partial(_look, file, reading)
        for seen in (pool.map if threads > 1 else map)(look, _runs(_parts(entries, kept))):
            for (entry, _, stop, _), digest, values in seen:
                digests.append(digest)
                tallies.append(values)
                if stop < entry.stop:
                    continue
                data = kept.get(entry.name)
                each = Held(
                    key=entry.name,
                    dtype=entry.dtype,
                    shape=entry.shape,
                    tally=join_tallies(tallies),
                    tensor=None if data is None else data.view(entry.dtype).reshape(entry.shape),
                    digest=joint_digest(digests) if reading.digests else None,
                    is_private=True,
                )
                held.append(each)
                digests, tallies = [], []
            reading.progress(sum(part.stop - part.start for part, _, _ in seen))
    return held


def _parts(entries: Sequence[TensorEntry], kept: Mapping[str, Tensor]) -> Iterator[_Part]:
    for entry in entries:
        data = kept[entry.name].numpy() if entry.name in kept else None
        for at in range(0, max(1, entry.nbytes), PIECE):
            stop = min(entry.start + at + PIECE, entry.stop)
            place = None if data is None else data[at : at + PIECE]
            yield _Part(entry, entry.start + at, stop, place)


def _runs(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Parts that follow one another, as many as are read at once."""
    run: list[_Part] = []
    for part in parts:
        if run and part.stop - run[0].start > PIECE:
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _look(file: OpenFile, reading: Reading, run: list[_Part]) -> list[tuple[_Part, bytes, Tally]]:
    """Read a run and look at its parts while they are in the processor's cache."""
    first = run[0]
    data = first.place if len(run) == 1 else None
    if data is None:
        data = np.empty(run[-1].stop - first.start, dtype=np.uint8)
    file.fill(data.data, first.start)
    found = []
    for part in run:
        own = data[part.start - first.start : part.stop - first.start]
        if part.place is not None and len(run) > 1:
            part.place[:] = own
            own = part.place
        values = Tally()
        if reading.scan:
            dtype = part.entry.dtype
            aligned = own if (part.start - first.start) % dtype.itemsize == 0 else own.copy()
            values = tally(torch.from_numpy(aligned).view(dtype))
        found.append((part, xxh3_128_digest(own.data) if reading.digests else b"", values))
    return found


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Operations on small pieces, not shared among torch's threads.

    Those wait for one another at every operation, which takes seconds on a busy machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class OpenFile:
    """An open file. It is read and not mapped: a failing disk is an error then, not a SIGBUS."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def bytes(self, start: int, stop: int) -> bytes:
        content = bytearray(stop - start)
        self.fill(memoryview(content), start)
        return bytes(content)

    def fill(self, place: memoryview, offset: int) -> None:
        """Read what follows the offset, until the place is full."""
        while len(place):
            count = os.preadv(self._descriptor, [place], offset)
            if not count:
                raise CheckpointError("it became shorter while it was read.")
            place, offset = place[count:], offset + count


@contextmanager
def open_file(path: Path) -> Iterator[OpenFile]:
    """The file, open within the block."""
    with one_line_errors(path):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            yield OpenFile(descriptor)
        finally:
            with suppress(OSError):  # everything has been read by then
                os.close(descriptor)


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Anything that keeps a file from being read, as one CheckpointError."""
    try:
        yield
    except CheckpointError as failure:
        if failure.problems or str(failure).startswith(str(path)):
            raise
        raise CheckpointError(f"{path} cannot be used: {failure}") from failure
    except OSError as failure:
        reason = failure.strerror or failure
        raise CheckpointError(f"{path} cannot be read: {reason}.") from failure
