"""Layers over sampled steps, kept in bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np

Row = np.ndarray[Any, np.dtype[np.float32]]

MOST = 512  # columns; when there are more, two become one
UNKNOWN = float(np.finfo(np.float32).min)
"""What was not recorded; NaN is a value like any other here."""


class Heat:
    """Columns of samples, each the worst of as many samples as the others have.

    The worst norm is the largest, NaN before Inf before any number; the worst headroom the least.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.steps: list[int] = []
        self.norms: list[Row] = []
        self.headroom: list[Row] = []
        self._each = 1  # samples in a column
        self._inside = 0  # samples in the last one

    def add(self, step: int, layers: list[str], norms: Row, headroom: Row) -> None:
        places = [self.names.setdefault(name, len(self.names)) for name in layers]
        rows = [_spread(values, places, len(self.names)) for values in (norms, headroom)]
        if self.steps and self._inside < self._each:
            self.norms[-1] = worst_norm(self.norms[-1], rows[0])
            self.headroom[-1] = least(self.headroom[-1], rows[1])
            self._inside += 1
            return
        self.steps.append(step)
        self.norms.append(rows[0])
        self.headroom.append(rows[1])
        self._inside = 1
        if len(self.steps) > MOST:
            self._halve()

    def table(self, kind: str, *, most: int, first: int = 0, last: int = 1 << 62) -> Table:
        """Steps and values (layers x steps), at most so many columns; headroom if kind says so."""
        rows, pick = (self.headroom, least) if kind == "headroom" else (self.norms, worst_norm)
        chosen = [n for n, step in enumerate(self.steps) if first <= step <= last]
        each = -(-len(chosen) // max(most, 1)) or 1
        groups = [chosen[start : start + each] for start in range(0, len(chosen), each)]
        merged = [_fold([self._full(rows[n]) for n in group], pick) for group in groups]
        steps = [self.steps[group[0]] for group in groups]
        if not merged:
            return steps, np.empty((len(self.names), 0), np.float32)
        return steps, np.stack(merged, axis=1).astype(np.float32)

    def history(self, name: str) -> dict[str, list[Any]] | None:
        """One layer at every column; None if there is no such layer."""
        place = self.names.get(name)
        if place is None:
            return None
        return {
            "steps": list(self.steps),
            "norms": [float(self._full(row)[place]) for row in self.norms],
            "headroom": [float(self._full(row)[place]) for row in self.headroom],
        }

    def _full(self, row: Row) -> Row:
        return _lengthened(row, len(self.names))

    def _halve(self) -> None:
        pairs = range(0, len(self.steps), 2)
        self._inside += self._each if len(self.steps) % 2 == 0 else 0
        self.norms = [_fold(self.norms[n : n + 2], worst_norm) for n in pairs]
        self.headroom = [_fold(self.headroom[n : n + 2], least) for n in pairs]
        self.steps = self.steps[::2]
        self._each *= 2


Table = tuple[list[int], Row]


def worst_norm(one: Row, other: Row) -> Row:
    one, other = _alike(one, other)
    return np.maximum(one, other)  # NaN wins, and what is unknown is the least number


def least(one: Row, other: Row) -> Row:
    one, other = _alike(one, other)
    known = np.where(one == UNKNOWN, other, one)
    return np.minimum(known, np.where(other == UNKNOWN, known, other))


def _fold(rows: list[Row], pick: Any) -> Row:
    found = rows[0]
    for row in rows[1:]:
        found = pick(found, row)
    return found


def _alike(one: Row, other: Row) -> tuple[Row, Row]:
    size = max(len(one), len(other))
    return _lengthened(one, size), _lengthened(other, size)


def _lengthened(row: Row, size: int) -> Row:
    missing = size - len(row)
    return np.pad(row, (0, missing), constant_values=UNKNOWN) if missing else row


def _spread(values: Row, places: list[int], size: int) -> Row:
    row = np.full(size, UNKNOWN, np.float32)
    row[places] = values
    return row
