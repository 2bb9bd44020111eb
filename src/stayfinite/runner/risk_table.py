"""Risks as text on stderr: level, place and cause, what is seen, and the fix."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from stayfinite.prevent.risks import Risk

_COLOURS = {"high": "bold red", "medium": "yellow", "low": "dim"}


def show(risks: Iterable[Risk], *, everything: bool) -> None:
    """Print the warnings, and with `everything` those of low level too."""
    from rich.console import Console

    console = Console(stderr=True, file=sys.stderr, highlight=False, soft_wrap=False)
    for risk in risks:
        if risk.is_warning or everything:
            _show(risk, console)


def _show(risk: Risk, console: object) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    assert isinstance(console, Console)
    head = Text.assemble((f"{risk.level:<7}", _COLOURS[risk.level]), (risk.where, "bold"))
    module = risk.evidence.get("module")
    if module:
        head.append(f" in {module}", "dim")
    head.append(f"  {risk.cause}", "dim")
    console.print(head)
    if code := risk.evidence.get("code"):
        console.print(Padding(Text(str(code), "cyan"), (0, 0, 0, 9)))
    console.print(Padding(Text(risk.what), (0, 0, 0, 7)))
    console.print(Padding(Text.assemble(("fix: ", "green"), risk.fix), (0, 0, 1, 7)))
