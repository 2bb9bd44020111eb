"""Padding masks that nobody named: which rows hide everything?"""

from __future__ import annotations

from array import array

from torch import Tensor

_MOST_PLACES = 10_000


class PaddingMasks:
    """Rows of booleans that change at most once, as those of padding masks do.

    Whether True keeps or hides is not known. Sequences that fill the whole width are common, so
    of rows that are all True and rows that are all False the rarer kind is taken as hidden.
    """

    def __init__(self) -> None:
        self.is_padding = True
        self._has_edges = False
        self._counts = [0, 0]
        self._places = (array("q"), array("q"))

    def add(self, values: Tensor, places: Tensor) -> None:
        self.is_padding = self.is_padding and values.ndim == 2 and values.shape[1] > 1
        if not self.is_padding:
            return
        changes = (values[:, 1:] != values[:, :-1]).sum(1)
        self.is_padding = bool((changes <= 1).all())
        self._has_edges = self._has_edges or bool((changes == 1).any())
        for kind in (False, True):
            rows = (changes == 0) & (values[:, 0] == kind)
            self._counts[kind] += int(rows.sum())
            if len(self._places[kind]) < _MOST_PLACES:
                self._places[kind].extend(places[rows].tolist())

    @property
    def hidden(self) -> array[int]:
        """The places of rows that hide everything."""
        if not (self.is_padding and self._has_edges and all(self._counts)):
            return array("q")
        return self._places[self._counts[True] < self._counts[False]]

    @property
    def places(self) -> array[int]:
        """The places that `hidden` may still speak of."""
        return self._places[0] + self._places[1] if self.is_padding else array("q")
