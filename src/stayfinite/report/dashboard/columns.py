"""The steps of one optimizer in little memory: a million take some 25 MB."""

from __future__ import annotations

import threading
from array import array
from typing import Any

import numpy as np

from stayfinite.report.dashboard.heat import UNKNOWN, Heat

_KINDS = {"step": "q", "skipped": "b"}
_KEPT = ("step", "seconds", "loss", "norm", "lr", "scale", "skipped")


class Columns:
    """Takes the place of a Series; one thread adds, others read under `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.layers: list[str] = []
        self.heat = Heat()
        self.lasted = 0.0
        self.terms: dict[str, array[Any]] = {}
        self._columns = {name: array(_KINDS.get(name, "f")) for name in _KEPT}

    def __len__(self) -> int:
        return len(self._columns["step"])

    def __getitem__(self, name: str) -> array[Any]:
        return self._columns[name]

    def add_steps(self, columns: dict[str, list[Any]], terms: dict[str, list[Any]]) -> None:
        new = {name: _packed(columns[name], name) for name in _KEPT}
        more = {name: _packed(values) for name, values in terms.items()}
        before, count = len(self), len(columns["step"])
        with self.lock:
            for name, values in new.items():
                self._columns[name].extend(values)
            for name in dict.fromkeys((*self.terms, *more)):
                if name not in self.terms:
                    self.terms[name] = array("f", [UNKNOWN]) * before
                self.terms[name].extend(more.get(name) or array("f", [UNKNOWN]) * count)
            self.lasted = next((t for t in reversed(columns["time"]) if t is not None), self.lasted)

    def add_norms(self, step: int, norms: list[Any], headroom: list[Any]) -> None:
        sampled = np.array(_packed(norms)), np.array(_packed(headroom))
        with self.lock:
            self.heat.add(step, self.layers, *sampled)

    def view(self, name: str) -> np.ndarray[Any, Any]:
        """The column itself, not a copy: only under `lock`, and gone before it is given back."""
        column = self.terms[name.removeprefix("term:")] if name.startswith("term:") else self[name]
        return np.frombuffer(column, dtype=column.typecode)


def _packed(values: list[Any], name: str = "") -> array[Any]:
    kind = _KINDS.get(name, "f")
    try:
        return array(kind, values)
    except TypeError:
        missing = UNKNOWN if kind == "f" else 0
        return array(kind, [missing if value is None else value for value in values])
