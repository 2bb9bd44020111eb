"""Whether many python values are still what they were, asked in a microsecond."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_, itemgetter
from typing import Any

from stayfinite.snapshot.plain import CONSTANTS, is_constant

Pick = Callable[[Sequence[Any]], tuple[Any, ...]]


class Form:
    """What is known of values: the type of each, and which things those are that can change.

    Constants may become others. Those at the places in `loose` are left to the caller.
    """

    def __init__(self, values: list[Any], *, loose: Iterable[int] = ()) -> None:
        self._types = [*map(type, values)]
        free = set(loose)
        odd = [place for place, its in enumerate(self._types) if its not in CONSTANTS]
        self._pick = picker([place for place in odd if place not in free])
        self._things = self._pick(values)

    def fits(self, values: list[Any]) -> bool:
        """Whether there is nothing new but constants and tuples of constants."""
        types = [*map(type, values)]
        if types != self._types:
            if len(types) != len(self._types) or not self._differ_in_constants(types):
                return False
            self._types = types
        things = self._pick(values)
        if all(map(is_, things, self._things)):
            return True
        pairs = zip(things, self._things, strict=True)
        is_like = all(n is o or (is_constant(n) and is_constant(o)) for n, o in pairs)
        self._things = things if is_like else self._things
        return is_like

    def _differ_in_constants(self, types: list[type]) -> bool:
        pairs = zip(types, self._types, strict=True)
        return CONSTANTS.issuperset(its for pair in pairs if pair[0] is not pair[1] for its in pair)


def same(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Whether they hold the same objects."""
    return len(one) == len(two) and all(map(is_, one, two))


def picker(places: Sequence[int]) -> Pick:
    """Gives what is at these places, as a tuple."""
    if not places:
        return lambda values: ()
    if len(places) == 1:
        place = places[0]
        return lambda values: (values[place],)
    return itemgetter(*places)


def is_note(value: Any) -> bool:
    """Whether it is a list or dict of nothing but constants."""
    if type(value) is list:
        return CONSTANTS.issuperset(map(type, value))
    return type(value) is dict and CONSTANTS.issuperset(map(type, value.values()))
