"""The progress bar of `fit`; nothing at all where the output is not a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressBar:
    """One line for each epoch: how far, the loss, and how many batches were skipped."""

    def __init__(self, *, epochs: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._epochs = epochs
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: Any = None

    def begin_epoch(self, number: int, length: int | None) -> None:
        description = f"epoch {number + 1}/{self._epochs}"
        self._task = self._progress.add_task(description, total=length, said="")

    def advance(self, *, loss: Any, skipped: int) -> None:
        """One batch is done. The loss is read from its device only when there is a bar."""
        if self._progress.disable:
            return
        said = "skipped" if loss is None else f"loss {float(loss):.4g}"
        said += f", {skipped} skipped" if skipped else ""
        self._progress.update(self._task, advance=1, said=said)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
