"""Every `stayfinite` command that README and docs name exists, with its options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from stayfinite.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
IN_TEXT = re.compile(r"`stayfinite ([a-z]+(?:\s[^`]*)?)`")
TYPED = re.compile(r"^\s*(?:\$ )?stayfinite ([a-z].*)$", re.M)
GROUP: Any = main


def commands() -> list[Any]:
    return [
        pytest.param(words, id=f"{page.relative_to(ROOT).as_posix()}: {' '.join(words)}")
        for page in PAGES
        for words in sorted(set(commands_in(page.read_text(encoding="utf-8"))))
    ]


def commands_in(text: str) -> list[tuple[str, ...]]:
    blocks = "\n".join(re.findall(r"^```(?:console|text)?\n(.*?)^```$", text, re.M | re.S))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    found = [*TYPED.findall(blocks), *IN_TEXT.findall(prose)]
    return [tuple(shlex.split(each.replace("\n", " "), comments=True)) for each in found]


def known_options(command: click.Command) -> set[str]:
    names = [name for each in command.params for name in (*each.opts, *each.secondary_opts)]
    return {"--help", "-h", *names}


def test_commands_are_found() -> None:
    assert len(commands()) > 50


@pytest.mark.parametrize("words", commands())
def test_command_exists(words: tuple[str, ...]) -> None:
    name, *rest = words
    command = GROUP.get_command(click.Context(GROUP), name)
    assert command is not None, f"there is no command {name!r}"
    for word in rest:
        if word.endswith(".py"):
            break  # what follows belongs to the script
        word = word.strip("[]")
        if word.startswith("-") and word != "-" and not word.startswith("-m"):
            assert word in known_options(command), word
        if word == "-m":
            break
