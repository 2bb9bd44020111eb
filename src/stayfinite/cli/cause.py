"""`stayfinite cause`: why training stops being finite, a page for each cause."""

from __future__ import annotations

import difflib
import re
from importlib.resources import files
from pathlib import Path

import click

import stayfinite
from stayfinite.cli import Refused

INSTALLED = "cause_pages"  # where pyproject.toml puts docs/causes into a wheel
_TO_ANOTHER_PAGE = re.compile(r"\[([^]]+)\]\((?!https?:)[^)]*\)")


@click.command("cause")
@click.argument("name", required=False)
def cause_command(name: str | None) -> None:
    """Explain a cause that a report names: the arithmetic, code that fails and code that holds.

    NAME is a cause, such as log_of_zero; without it, all of them are listed.
    """
    from stayfinite.causes import CAUSES

    if name is None:
        width = max(map(len, CAUSES))
        for slug, cause in CAUSES.items():
            click.echo(f"{slug:<{width}}  {cause.title}")
        return
    if name not in CAUSES:
        near = difflib.get_close_matches(name, CAUSES, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise Refused(f"there is no cause {name!r}.{meant} `stayfinite cause` lists all of them.")
    _show(page_of(name))


def page_of(slug: str) -> str:
    """The page of a cause as Markdown, from the installed package or from the source."""
    source = Path(stayfinite.__file__).resolve().parents[2] / "docs" / "causes"
    for folder in (files("stayfinite") / INSTALLED, source):
        page = folder / f"{slug}.md"
        if page.is_file():
            return _TO_ANOTHER_PAGE.sub(r"\1", page.read_text(encoding="utf-8"))
    raise Refused("the pages of the causes are not installed; install stayfinite again.")


def _show(text: str) -> None:
    """Laid out on a terminal; as it is written where it is piped."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    if console.is_terminal:
        console.print(Markdown(text, hyperlinks=False))
    else:
        click.echo(text, nl=False)
