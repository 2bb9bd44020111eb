"""A file that is read at any place, by any thread, with errors of one line."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from stayfinite.errors import CheckpointError

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
