"""The last few good moments of training."""

from __future__ import annotations

from collections import deque

from stayfinite.errors import ConfigError, SnapshotError
from stayfinite.snapshot.copies import Offload
from stayfinite.snapshot.record import Snapshot
from stayfinite.snapshot.state import TrainingState

_OFFLOADS = ("none", "cpu", "pinned")


class SnapshotRing:
    """The newest `slots` snapshots; a new one is written into the memory of the oldest.

    The newest is never lost. The oldest may be, when a bad value turns up in a large tensor
    while it is already being written over; a ring of one slot looks at everything first.
    With `offload` they are kept in the host's memory, pinned for faster copies or not.
    """

    def __init__(self, state: TrainingState, *, slots: int = 2, offload: Offload = "none") -> None:
        if slots < 1:
            raise ConfigError(f"slots is {slots}; it must be at least 1.")
        if offload not in _OFFLOADS:
            known = ", ".join(map(repr, _OFFLOADS))
            raise ConfigError(f"offload is {offload!r}; it must be one of {known}.")
        self._state, self._slots, self._offload = state, slots, offload
        self._kept: deque[Snapshot] = deque()
        self._free: list[Snapshot] = []

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, *, step: int) -> Snapshot:
        """A snapshot of now. NonFiniteError when it is not finite; the newest before stays."""
        into = self._kept[0] if len(self._kept) == self._slots else None
        room = into or (self._free[-1] if self._free else None)
        try:
            snapshot = self._state.capture(
                step=step, into=room, offload=self._offload, careful=self._slots == 1
            )
        except BaseException:
            if into is not None and not into.is_whole:  # it was refused or interrupted midway
                self._free.append(self._kept.popleft())
            raise
        if into is not None:
            self._kept.popleft()
        elif room is not None:
            self._free.pop()
        self._kept.append(snapshot)
        return snapshot

    def apart(self, *, step: int) -> Snapshot:
        """A snapshot of now that is not in the ring, in the host's memory."""
        return self._state.capture(step=step, offload="cpu")

    def back(self, k: int = 0) -> Snapshot | None:
        """The k-th newest, 0 the newest; None when there are not so many."""
        return self._kept[-1 - k] if 0 <= k < len(self._kept) else None

    def restore(self, k: int = 0, *, rewind_loader: bool = True) -> Snapshot:
        """Go back to the k-th newest; newer ones are forgotten."""
        snapshot = self.back(k)
        if snapshot is None:
            raise SnapshotError(
                f"there is no snapshot {k} back, only {len(self)} are kept; "
                "take them more often, or keep more slots."
            )
        self._state.restore(snapshot, rewind_loader=rewind_loader)
        for _ in range(k):
            self._free.append(self._kept.pop())
        return snapshot
