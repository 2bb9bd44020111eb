"""The report in the terminal: laid out like a compiler error, at most thirty lines."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from stayfinite.records import Incident
from stayfinite.report.layout import Page, fit, flat
from stayfinite.report.parts import PARTS
from stayfinite.report.wording import closing_line as closing_line

WIDTH = 100  # where there is no terminal to ask
NARROWEST = 20


@dataclass(frozen=True, kw_only=True)
class _Report:
    incident: Incident
    folder: Path | None
    verbose: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        page = Page(
            incident=self.incident,
            folder=self.folder,
            verbose=self.verbose,
            console=console,
            width=max(options.max_width, NARROWEST),
        )
        parts = [part for make in PARTS if (part := make(page)).lines]
        yield from flat(parts) if self.verbose else fit(parts, page)


def render(
    incident: Incident, *, verbose: bool = False, folder: Path | None = None
) -> RenderableType:
    """The incident as something rich can print.

    `folder` is the script's folder, against which the origin's file is resolved; the
    working directory if None.
    """
    return _Report(incident=incident, folder=folder, verbose=verbose)


def show(
    incident: Incident,
    *,
    verbose: bool = False,
    folder: Path | None = None,
    file: TextIO | None = None,
) -> None:
    """Print the incident, by default to stderr; plain text where that is not a terminal."""
    file = file or sys.stderr
    console = _console(file)
    with console.capture() as capture:
        console.print(render(incident, verbose=verbose, folder=folder), crop=False)
    # A file that takes only ASCII must not turn a report into a UnicodeEncodeError.
    encoding = getattr(file, "encoding", None) or "utf-8"
    file.write(capture.get().encode(encoding, "backslashreplace").decode(encoding))
    file.flush()


def as_text(incident: Incident, *, verbose: bool = False, folder: Path | None = None) -> str:
    """The report as plain text."""
    page = io.StringIO()
    show(incident, verbose=verbose, folder=folder, file=page)
    return page.getvalue()


def _console(file: TextIO) -> Console:
    asked = Console(file=file)
    bare = not asked.is_terminal or bool(os.environ.get("NO_COLOR"))
    known = asked.is_terminal or "COLUMNS" in os.environ
    return Console(
        file=file,
        highlight=False,
        markup=False,
        emoji=False,
        width=asked.width if known else WIDTH,
        color_system=None if bare else "auto",
    )
