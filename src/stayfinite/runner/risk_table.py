"""Risks as text on stderr: level, place and cause, what is seen, and the fix."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from stayfinite.prevent.risks import Risk

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_COLOURS = {"high": "bold red", "medium": "yellow", "low": "dim"}
_NARROWEST = 20


def show(risks: Iterable[Risk], *, everything: bool) -> None:
    """Print the warnings, and with `everything` those of low level too."""
    from rich.console import Console

    console = Console(stderr=True, file=sys.stderr, highlight=False)
    for risk in risks:
        if risk.is_warning or everything:
            _show(risk, console)


def _show(risk: Risk, console: Console) -> None:
    from rich.text import Text

    head = Text.assemble((f"{risk.level:<7}", _COLOURS[risk.level]), (risk.where, "bold"))
    module = risk.evidence.get("module")
    if module:
        head.append(f" in {module}", "dim")
    head.append(f"  {risk.cause}", "dim")
    _print(head, console)
    if code := risk.evidence.get("code"):
        _print(Text(str(code), "cyan"), console, indent=9)
    _print(Text(risk.what), console, indent=7)
    _print(Text.assemble(("fix: ", "green"), risk.fix), console, indent=7)
    console.print()


def _print(text: Text, console: Console, *, indent: int = 0) -> None:
    """Wrapped to the width of the terminal, without blanks at the ends of lines."""
    for line in text.wrap(console, max(_NARROWEST, console.width - indent)):
        line.rstrip()
        line.pad_left(indent)
        console.print(line, soft_wrap=True)
