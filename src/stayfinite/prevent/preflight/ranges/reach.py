"""What a tensor can be: its bounds, what they depend on, and what it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from stayfinite.prevent.preflight.ranges.bounds import ANY, INF, Bounds

# Why a bound is open, the most telling first: the output of a layer, something nobody bounds, a
# quotient, data, the log of a probability, a parameter.
Open = Literal["layer", "other", "ratio", "data", "log", "parameter"]
_TELLING: tuple[Open, ...] = ("layer", "other", "ratio", "data", "log", "parameter")


@dataclass(slots=True, eq=False)
class Reach:
    """The values that a tensor can take.

    `learned`: training changes it; `fed`: it depends on data; `frozen`: on parameters that are
    not trained now. `guarded`: its values were chosen by a look at them, as torch.where does.
    `peaks`: its largest element is `high`. `chance`: how likely it is that nothing was selected
    or counted in it. `read`: the program looked at it and may have gone another way.
    """

    bounds: Bounds = ANY
    learned: bool = False
    fed: bool = False
    op: str = ""
    made_from: tuple[Reach, ...] = ()
    open: Open | None = None
    frozen: bool = False
    guarded: bool = False
    peaks: bool = False
    unwritten: bool = False
    settled: bool = False
    is_index: bool = False
    read: bool = False
    chance: float | None = None
    users: list[Reach] = field(default_factory=list)

    @property
    def varies(self) -> bool:
        return self.learned or self.fed

    @property
    def is_raw(self) -> bool:
        """Whether it is data, and nothing that a model has made of it."""
        return self.fed and not (self.learned or self.frozen or self.is_index)

    @property
    def is_open(self) -> bool:
        return self.bounds.low == -INF or self.bounds.high == INF

    def ancestors(self, depth: int) -> Iterator[Reach]:
        """Itself and what it was made from, the nearest first, so many operations back."""
        near, seen = [self], {id(self)}
        for _ in range(depth + 1):
            yield from near
            parents = [parent for reach in near for parent in reach.made_from]
            near = _new(parents, seen)

    def followers(self, depth: int) -> Iterator[Reach]:
        """What was made from it, the nearest first."""
        near, seen = [self], {id(self)}
        for _ in range(depth):
            users = [user for reach in near for user in reach.users]
            near = _new(users, seen)
            yield from near

    def comes_from(self, other: Reach, *, within: int) -> bool:
        return any(reach is other for reach in self.ancestors(within))

    def has_been_read(self) -> bool:
        return any(reach.read for reach in self.ancestors(3))


def _new(reaches: list[Reach], seen: set[int]) -> list[Reach]:
    found = []
    for reach in reaches:
        if id(reach) not in seen:
            seen.add(id(reach))
            found.append(reach)
    return found


def why_open(parents: tuple[Reach, ...]) -> Open | None:
    """The most telling reason among those parents that have an open bound."""
    found = [parent.open for parent in parents if parent.open is not None and parent.is_open]
    return min(found, key=_TELLING.index) if found else None
