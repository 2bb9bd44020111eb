"""One change of one file, as text."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass

NO_NEWLINE = "\\ No newline at end of file\n"
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A change of one file that may cure an incident; it is a fix only once it was tried."""

    file: str
    """Absolute."""
    before: str
    after: str
    what: str
    """One sentence: "Clamp the probability before the logarithm."."""

    def diff(self, *, folder: str) -> str:
        """A unified diff; the file's name in it is relative to `folder`."""
        name = os.path.relpath(self.file, folder).replace(os.sep, "/")
        return unified(self.before, self.after, name=name)


def unified(before: str, after: str, *, name: str) -> str:
    """The unified diff of two texts, with three lines of context; "" when they are equal."""
    lines = difflib.unified_diff(lines_of(before), lines_of(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}" for line in lines)


def lines_of(text: str) -> list[str]:
    r"""The lines with their ends; only "\n" ends one, so that "\r\n" and "\f" stay as they are."""
    return _LINE.findall(text)
