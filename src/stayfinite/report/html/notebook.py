"""The incidents of a guard where one looks at them: as HTML in a notebook, else as text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stayfinite.records import Incident
from stayfinite.report.html.words import Causes


class GuardReport:
    """What a guard has seen up to now; later incidents do not change it."""

    def __init__(
        self,
        incidents: Sequence[Incident],
        *,
        steps: int,
        causes: Causes,
        folder: Path | None = None,
    ) -> None:
        """`folder` is what the files of the incidents are named relative to."""
        self.incidents = tuple(incidents)
        self.steps = steps
        self._causes, self._folder = causes, folder

    def _repr_html_(self) -> str:
        with _unchanged_random():
            from stayfinite.report.html.page import incidents_fragment

            return incidents_fragment(
                self.incidents, steps=self.steps, causes=self._causes, folder=self._folder
            )

    def __repr__(self) -> str:
        with _unchanged_random():
            from stayfinite.report.html.page import alike, counted
            from stayfinite.report.terminal import as_text

            told = [as_text(first, folder=self._folder) for first, _ in alike(self.incidents)]
        return "\n".join([counted(len(self.incidents), self.steps).text, *told]).rstrip()


@contextmanager
def _unchanged_random() -> Iterator[None]:
    """What draws and lays out may draw random numbers, even when it is loaded."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
