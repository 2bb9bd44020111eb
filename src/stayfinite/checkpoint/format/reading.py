"""Reads safetensors files, ours and others', once from front to end, checking on the way."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from stayfinite.checkpoint.format.digests import Digest
from stayfinite.checkpoint.format.held import Held
from stayfinite.checkpoint.format.layout import Entry, Header, header_length, parse
from stayfinite.checkpoint.format.parallel import ahead, one_torch_thread, threads_for
from stayfinite.checkpoint.format.sealed import MARK, SEAL, is_sealed, stored_digests
from stayfinite.checkpoint.format.tally import Tally
from stayfinite.checkpoint.problems import Problem
from stayfinite.errors import CheckpointError

_LONGEST_READ = 1 << 30
_PIECE = 4 << 20
_WORTH_THREADS = 4 * _PIECE


def nothing_told(count: int) -> None:
    """The progress that nobody watches."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read: which tensors stay in memory, whether all get digests, whom to tell of bytes.

    Without `keep` none stays, and a file is only looked through.
    """

    keep: Callable[[str], bool] | None = None
    digests: bool = False
    progress: Callable[[int], None] = nothing_told


@dataclass(frozen=True, kw_only=True)
class SafeFile:
    """What is in one safetensors file; `problems` are tensors that were damaged."""

    header: Header
    is_ours: bool
    held: dict[str, Held]
    problems: list[Problem] = field(default_factory=list)


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


def read_safetensors(path: Path, reading: Reading) -> SafeFile:
    """The file's tensors, each verified and tallied; CheckpointError when it has no sound header.

    With nothing to keep this needs a few MiB of memory, however large the file is.
    """
    with _opened(path) as descriptor:
        return _Reader(descriptor, reading).file()


def header_of(path: Path) -> tuple[Header, bool]:
    """Only the header, unverified, and whether the file is ours."""
    with _opened(path) as descriptor:
        return _Reader(descriptor, Reading()).header()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    with one_line_errors(path):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            yield descriptor
        finally:
            with suppress(OSError):  # everything has been read by then
                os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A part of a tensor; `target` is where it stays, if it does."""

    entry: Entry
    start: int
    count: int
    target: Tensor | None

    @property
    def is_last(self) -> bool:
        return self.start + self.count == self.entry.nbytes


class _Reader:
    def __init__(self, descriptor: int, reading: Reading) -> None:
        self._descriptor = descriptor
        self._reading = reading
        self._has_digests = reading.digests
        self._spare: deque[Tensor] = deque()

    def header(self) -> tuple[Header, bool]:
        size = os.fstat(self._descriptor).st_size
        length = header_length(self._bytes(0, min(8, size)), size)
        header = parse(self._bytes(0, 8 + length), size)
        return header, is_sealed(header, self._bytes(max(0, size - len(MARK)), size))

    def file(self) -> SafeFile:
        header, is_ours = self.header()
        expected = stored_digests(header, self._content) if is_ours else []
        self._has_digests |= is_ours
        self._reading.progress(len(header.raw))
        entries = [entry for entry in header.entries if entry.name != SEAL or not is_ours]
        with one_torch_thread():
            held = {each.key: each for each in self._tensors(entries)}
        problems = [
            _damaged(entry)
            for entry, digest in zip(entries, expected, strict=False)
            if held[entry.name].digest != digest
        ]
        return SafeFile(header=header, is_ours=is_ours, held=held, problems=problems)

    def _tensors(self, entries: list[Entry]) -> Iterator[Held]:
        size = sum(entry.nbytes for entry in entries)
        threads = threads_for(size, at_least=_WORTH_THREADS)
        tally, digest = Tally(), Digest()
        for piece, data in ahead(self._read, self._pieces(entries), threads):
            tally.add(data.view(piece.entry.dtype))
            if self._has_digests:
                digest.update(data)
            if piece.target is None:
                self._spare.append(data)
            self._reading.progress(piece.count)
            if piece.is_last:
                yield self._held(piece, tally, digest)
                tally, digest = Tally(), Digest()

    def _pieces(self, entries: list[Entry]) -> Iterator[_Piece]:
        keep = self._reading.keep
        for entry in entries:
            target = None
            if keep is not None and keep(entry.name):
                target = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
            for start in range(0, max(1, entry.nbytes), _PIECE):
                count = min(_PIECE, entry.nbytes - start)
                yield _Piece(entry=entry, start=start, count=count, target=target)

    def _read(self, piece: _Piece) -> Tensor:
        if piece.target is None:
            data = self._buffer()[: piece.count]
        else:
            data = piece.target[piece.start : piece.start + piece.count]
        self._fill(data, piece.entry.start + piece.start)
        return data

    def _buffer(self) -> Tensor:
        """Memory for a piece, used again and again."""
        try:
            spare = self._spare.pop()
        except IndexError:
            return torch.empty(_PIECE, dtype=torch.uint8, device="cpu")
        return spare.as_strided((_PIECE,), (1,))

    def _held(self, piece: _Piece, tally: Tally, digest: Digest) -> Held:
        entry, data = piece.entry, piece.target
        return Held(
            key=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            tally=tally,
            tensor=None if data is None else data.view(entry.dtype).reshape(entry.shape),
            digest=digest.value() if self._has_digests else None,
            is_private=True,
        )

    def _content(self, entry: Entry) -> bytes:
        return self._bytes(entry.start, entry.stop)

    def _bytes(self, start: int, stop: int) -> bytes:
        buffer = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        self._fill(buffer, start)
        return buffer.numpy().tobytes()

    def _fill(self, buffer: Tensor, offset: int) -> None:
        view = buffer.numpy().data
        done = 0
        while done < len(view):
            # A kernel reads 2 GiB at most in one call.
            count = os.preadv(self._descriptor, [view[done : done + _LONGEST_READ]], offset + done)
            if not count:
                raise CheckpointError("it became shorter while it was read.")
            done += count


def _damaged(entry: Entry) -> Problem:
    return Problem(
        kind="damaged",
        key=entry.name,
        message="its bytes are not those that were saved; the checksum differs. "
        "Load an older generation.",
    )
