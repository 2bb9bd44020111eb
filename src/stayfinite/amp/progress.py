"""The progress bar of `fit`; nothing at all where the output is not a terminal."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS = 0.1  # between two looks at the screen


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """rich draws from Python's generator, even while it is imported; training must not notice."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


class ProgressBar:
    """One line for each epoch: how far, the loss, and how many batches were skipped."""

    def __init__(self, *, epochs: int, console: Console | None = None) -> None:
        self._epochs = epochs
        self._task: Any = None
        self._drawn = 0.0
        with _same_random_numbers():
            self._progress = _bar(console)

    def begin_epoch(self, number: int, length: int | None) -> None:
        with _same_random_numbers():
            description = f"epoch {number + 1}/{self._epochs}"
            self._task = self._progress.add_task(description, total=length, said="")

    def advance(self, *, loss: Any, skipped: int) -> None:
        """One batch is done. The loss is read from its device only when it is shown."""
        if self._progress.disable:
            return
        self._progress.advance(self._task)
        if time.monotonic() - self._drawn >= _SECONDS:
            self._show(loss, skipped)

    def end_epoch(self, *, loss: Any, skipped: int) -> None:
        """The last batch of an epoch is done."""
        if not self._progress.disable:
            self._show(loss, skipped)

    def _show(self, loss: Any, skipped: int) -> None:
        said = "skipped" if loss is None else f"loss {float(loss):.4g}"  # host sync
        said += f", {skipped} skipped" if skipped else ""
        with _same_random_numbers():
            self._progress.update(self._task, said=said)
            self._progress.refresh()
        self._drawn = time.monotonic()

    def __enter__(self) -> Self:
        with _same_random_numbers():
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with _same_random_numbers():
            self._progress.stop()


def _bar(console: Console | None) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeColumn

    console = console or Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeColumn(),
        console=console,
        disable=not console.is_terminal,
        auto_refresh=False,  # a thread would draw random numbers at any time
    )
