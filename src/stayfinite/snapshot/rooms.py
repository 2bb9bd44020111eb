"""Memory of our own that is filled again and again with the values of the same tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from stayfinite.detect.parts import undisturbed
from stayfinite.snapshot.copies import (
    Group,
    Offload,
    copy_all,
    copy_groups,
    grouped,
    is_simple,
    like,
    memories,
    put_back,
    size_of,
)
from stayfinite.snapshot.finite import alike, is_easy
from stayfinite.snapshot.runs import Run, runs_of, side_by_side

Memories = list[Tensor]
_CPU = torch.device("cpu")


class Rooms:
    """Room for the value of each tensor; while these keep their form, filling is a call or two.

    `known` is memory from before, for each tensor; it is used where it fits. Of the tensors
    whose numbers are in `checked`, those that the host can add up are kept in `runs`, and the
    numbers of the others are in `not_in_runs`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        offload: Offload = "none",
        known: Sequence[Memories] | None = None,
        checked: Collection[int] = (),
    ) -> None:
        self.tensors, self._offload, self._checked = list(tensors), offload, checked
        self.memories = list(known) if known is not None else [[] for _ in self.tensors]
        self._arrange()

    def _arrange(self) -> None:
        """Make room for what does not fit, and see what can be copied together."""
        now = [memories(tensor) for tensor in self.tensors]
        in_runs = [n for n in self._checked if self.tensors[n].is_cpu and is_easy(self.tensors[n])]
        self._make_room(now, in_runs)
        simple = {number for number, tensor in enumerate(self.tensors) if is_simple(tensor)}
        # The memory of the others must be looked for each time.
        self._others = sorted(set(range(len(now))) - simple)
        self.not_in_runs = sorted(set(self._checked) - set(in_runs))
        rest = sorted(simple - set(in_runs))
        self._groups: list[Group] = grouped((self.memories[n][0], now[n][0]) for n in rest)
        self.runs: list[Run] = runs_of((number, self.memories[number][0]) for number in in_runs)
        self._simple = [self.tensors[number] for number in sorted(simple)]
        self._forms = self._forms_now()

    def _forms_now(self) -> list[object]:
        return [(tensor.shape, tensor.dtype, tensor.is_cpu) for tensor in self._simple]

    def _make_room(self, now: list[Memories], in_runs: list[int]) -> None:
        pairs = zip(self.memories, now, strict=True)
        misfits = {number for number, pair in enumerate(pairs) if not self._fits(*pair)}
        for number in misfits - set(in_runs):
            self.memories[number] = [like(value, self._offload) for value in now[number]]
        missing = {id(self.tensors[number]): number for number in in_runs if number in misfits}
        for group in alike(self.tensors[number] for number in missing.values()):
            for tensor, memory in zip(group, side_by_side(group), strict=True):
                self.memories[missing[id(tensor)]] = [memory]

    def _fits(self, room: Memories, values: Memories) -> bool:
        return len(room) == len(values) and all(map(self._fits_one, room, values))

    def _fits_one(self, memory: Tensor, value: Tensor) -> bool:
        return (
            memory.shape == value.shape
            and memory.dtype is value.dtype
            and memory.layout is value.layout
            and memory.device == (value.device if self._offload == "none" else _CPU)
        )

    def fit(self) -> bool:
        """Whether all tensors that are copied together still have the form they had."""
        return self._forms_now() == self._forms

    def fill(self) -> None:
        """Copy the values of now."""
        if not self.fit():
            self._arrange()
        if self.runs:
            self.fill_runs()
        self.fill_rest()

    @undisturbed
    def fill_runs(self) -> None:
        for run in self.runs:
            run.fill(self.tensors)

    def fill_rest(self) -> None:
        """Copy the values of now that are not in runs."""
        for number in self._others:
            now = memories(self.tensors[number])
            if not self._fits(self.memories[number], now):
                self.memories[number] = [like(value, self._offload) for value in now]
            copy_all(zip(self.memories[number], now, strict=True))
        copy_groups(self._groups, non_blocking=self._offload == "pinned")

    def empty(self, numbers: Sequence[int] | None = None) -> None:
        """Put the values back into the tensors, or into some of them."""
        which = range(len(self.tensors)) if numbers is None else numbers
        put_back([self.tensors[n] for n in which], [self.memories[n] for n in which])

    @property
    def nbytes(self) -> int:
        return sum(size_of(memory) for room in self.memories for memory in room)
