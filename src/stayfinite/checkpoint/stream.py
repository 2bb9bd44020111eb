"""Reads safetensors files, ours and others', once from front to end, checking on the way."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from stayfinite.checkpoint.format import (
    MARK,
    PIECE,
    Bytes,
    Entry,
    Header,
    Stamp,
    Tally,
    header_length,
    is_sealed,
    joint_digest,
    parse,
    piece_digest,
    stored_stamps,
    tally,
    together,
)
from stayfinite.checkpoint.problem import Problem
from stayfinite.checkpoint.values import Held
from stayfinite.errors import CheckpointError

_MOST_PARTS = 512
_APART = 64
_SPANS = 8
_WORTH_THREADS = 4 * _SPANS * PIECE


def nothing_told(count: int) -> None:
    """The progress that nobody watches."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read: which tensors stay in memory, whether all get digests, whom to tell of bytes.

    Without `keep` none stays, and a file is only looked through. `scan`: the values of our own
    files are looked at too, though their seal says what they are.
    """

    keep: Callable[[str], bool] | None = None
    digests: bool = False
    scan: bool = False
    progress: Callable[[int], None] = nothing_told


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
    with opened(path) as source:
        header, is_ours = _header(source)
        reading.progress(len(header.raw))
        if not is_ours:
            found = _Reader(source, replace(reading, scan=True)).tensors(header.entries)
            held = [_held(each, each.tally) for each in found]
            return SafeFile(header=header, is_ours=False, held={each.key: each for each in held})
        stamps = stored_stamps(header, source.bytes)
        found = _Reader(source, replace(reading, digests=True)).tensors(header.entries[:-1])
    stamped = list(zip(found, stamps, strict=True))
    held = [_held(each, stamp.tally) for each, stamp in stamped]
    damaged = [_damaged(each) for each, stamp in stamped if not _is_as_stamped(each, stamp)]
    by_name = {each.key: each for each in held}
    return SafeFile(header=header, is_ours=True, held=by_name, problems=damaged)


def header_of(path: Path) -> tuple[Header, bool]:
    """Only the header, unverified, and whether the file is ours."""
    with opened(path) as source:
        return _header(source)


def _header(source: Source) -> tuple[Header, bool]:
    size = source.size
    length = header_length(source.bytes(0, min(8, size)), size)
    header = parse(source.bytes(0, 8 + length), size)
    return header, is_sealed(header, source.bytes(max(0, size - len(MARK)), size))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A tensor, or a piece of a large one; `target` is where the tensor stays, if it does."""

    entry: Entry
    start: int
    count: int
    target: Tensor | None

    @property
    def is_last(self) -> bool:
        return self.start + self.count == self.entry.nbytes


class _Seen(NamedTuple):
    """What looking at a part, or at all parts of a tensor, has shown."""

    part: _Part
    digest: bytes
    tally: Tally


def _is_as_stamped(seen: _Seen, stamp: Stamp) -> bool:
    """Whether bytes and values are those that were saved; the values only if they were scanned."""
    return seen.digest == stamp.digest and seen.tally in (Tally(), stamp.tally)


def _damaged(seen: _Seen) -> Problem:
    return Problem(
        kind="damaged",
        key=seen.part.entry.name,
        message="its bytes are not those that were saved; the checksum differs. "
        "Load an older generation.",
    )


def _held(seen: _Seen, known: Tally) -> Held:
    entry, data = seen.part.entry, seen.part.target
    return Held(
        key=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        tally=known,
        tensor=None if data is None else data.view(entry.dtype).reshape(entry.shape),
        digest=seen.digest or None,
        is_private=True,
    )


class _Reader:
    """Reads tensors in spans: parts that follow one another, together no larger than a piece."""

    def __init__(self, source: Source, reading: Reading) -> None:
        self._source = source
        self._reading = reading

    def tensors(self, entries: Sequence[Entry]) -> list[_Seen]:
        size = sum(entry.nbytes for entry in entries)
        threads = threads_for(size, at_least=_WORTH_THREADS)
        with one_torch_thread() if self._reading.scan else nullcontext():
            return list(self._tensors(entries, threads))

    def _tensors(self, entries: Sequence[Entry], threads: int) -> Iterator[_Seen]:
        parts: list[_Seen] = []
        for _, seen in ahead(self._look_at_all, self._jobs(entries), threads):
            for each in seen:
                parts.append(each)
                if each.part.is_last:
                    yield _whole(parts)
                    parts = []
            self._reading.progress(sum(each.part.count for each in seen))

    def _jobs(self, entries: Sequence[Entry]) -> Iterator[list[list[_Part]]]:
        """Several spans at a time, since handing work to a thread costs as much as reading one."""
        spans = self._spans(entries)
        while job := list(islice(spans, _SPANS)):
            yield job

    def _spans(self, entries: Sequence[Entry]) -> Iterator[list[_Part]]:
        span: list[_Part] = []
        size = 0
        for part in self._parts(entries):
            if span and (size + part.count > PIECE or len(span) == _MOST_PARTS):
                yield span
                span, size = [], 0
            span.append(part)
            size += part.count
        if span:
            yield span

    def _parts(self, entries: Sequence[Entry]) -> Iterator[_Part]:
        keep = self._reading.keep
        for entry in entries:
            target = None
            if keep is not None and keep(entry.name):
                target = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
            for start in range(0, max(1, entry.nbytes), PIECE):
                count = min(PIECE, entry.nbytes - start)
                yield _Part(entry=entry, start=start, count=count, target=target)

    def _look_at_all(self, spans: list[list[_Part]]) -> list[_Seen]:
        buffer = np.empty(PIECE + _MOST_PARTS * _APART, dtype=np.uint8)
        return [seen for span in spans for seen in self._look(span, buffer)]

    def _look(self, span: list[_Part], buffer: Bytes) -> list[_Seen]:
        """Read a span and look at its parts while they are in the processor's cache."""
        places = list(_places(span, buffer))
        self._source.fill([each.data for each in places], span[0].entry.start + span[0].start)
        return [self._seen(*each) for each in zip(span, places, strict=True)]

    def _seen(self, part: _Part, data: Bytes) -> _Seen:
        digest = piece_digest(data) if self._reading.digests else b""
        if not self._reading.scan:
            return _Seen(part, digest, Tally())
        return _Seen(part, digest, tally(torch.from_numpy(data).view(part.entry.dtype)))


def _whole(parts: list[_Seen]) -> _Seen:
    """What is known of a tensor from its parts."""
    digests = [each.digest for each in parts]
    digest = joint_digest(digests) if any(digests) else b""
    return _Seen(parts[-1].part, digest, together(each.tally for each in parts))


def _places(span: list[_Part], buffer: Bytes) -> Iterator[Bytes]:
    """Where the parts go: to their targets, or one after another into the buffer, aligned."""
    at = 0
    for part in span:
        if part.target is not None:
            yield part.target.numpy()[part.start : part.start + part.count]
        else:
            yield buffer[at : at + part.count]
            at += part.count + -part.count % _APART


Job = TypeVar("Job")
Result = TypeVar("Result")

MOST_THREADS = 4


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


def threads_for(size: int, *, at_least: int) -> int:
    """How many threads are worth starting for so many bytes; 0: none."""
    return 0 if size < at_least else min(MOST_THREADS, os.cpu_count() or 1)


def ahead(
    work: Callable[[Job], Result], jobs: Iterable[Job], threads: int
) -> Iterator[tuple[Job, Result]]:
    """Each job with its result, in the order of the jobs; at most 2 * threads run ahead."""
    if not threads:
        for job in jobs:
            yield job, work(job)
        return
    pending: deque[tuple[Job, Future[Result]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for job in jobs:
            pending.append((job, pool.submit(work, job)))
            if len(pending) > 2 * threads:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()


_MOST_PLACES = 1000  # a kernel reads into 1,024 of them in one call


class Source:
    """An open file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def bytes(self, start: int, stop: int) -> bytes:
        content = bytearray(stop - start)
        self.fill([memoryview(content)], start)
        return bytes(content)

    def fill(self, places: Iterable[memoryview], offset: int) -> None:
        """Read what follows the offset into these places, one after another."""
        left = deque(place for place in places if len(place))
        while left:
            count = os.preadv(self._descriptor, list(islice(left, _MOST_PLACES)), offset)
            if not count:
                raise CheckpointError("it became shorter while it was read.")
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """The file, open within the block."""
    with one_line_errors(path):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            yield Source(descriptor)
        finally:
            with suppress(OSError):  # everything has been read by then
                os.close(descriptor)


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Anything that keeps a file from being read, as one CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        if error.problems or str(error).startswith(str(path)):
            raise
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error
