"""Recipes, done from an empty folder: their files are written, their commands typed.

So are those of the quickstart, and of how it works. A block with a title is a file. In a `console`
block each line after a `$` is typed, and the lines below it are what it says, in this order; `...`
stands for anything.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import forks
import pytest

import stayfinite

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs" / "quickstart.md",
    ROOT / "docs" / "how_it_works.md",
    *sorted((ROOT / "docs" / "recipes").glob("*.md")),
]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
PROGRAMS = {
    "stayfinite": "-m stayfinite",
    "python": "",
    "pytest": "-m pytest -p no:cacheprovider",
    "torchrun": "-m torch.distributed.run",
}
PLUGIN = "stayfinite.integrations.pytest_plugin"  # known to pytest where stayfinite is installed
if not any(point.value == PLUGIN for point in entry_points(group="pytest11")):
    PROGRAMS["pytest"] += f" -p {PLUGIN}"


def parts(page: Path) -> list[tuple[str, str, str]]:
    """(kind, title, text) of the blocks that are files or commands, in their order."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [block for block in blocks if block[1] or block[0] == "console"]


def typed(block: str) -> Iterator[tuple[str, list[str]]]:
    """Each command with the lines that it is to say."""
    for each in re.split(r"^\$ ", block, flags=re.M)[1:]:
        command, *said = each.splitlines()
        yield command, [line for line in said if line not in ("", "...")]


def is_said(expected: list[str], text: str) -> str | None:
    """The first expected line that does not come, or not after the one before it."""
    lines = iter(text.splitlines())
    for line in expected:
        pattern = re.compile(re.escape(line.rstrip()).replace(r"\.\.\.", ".*"))
        if not any(pattern.fullmatch(found.rstrip()) for found in lines):
            return line
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_only_files_of_tests_need_pytest(page: Path) -> None:
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    others = [text for kind, title, text in blocks if not title.startswith("test_")]
    assert not any("import pytest" in text for text in others)


def environment(folder: Path) -> dict[str, str]:
    """In which programs are found, as forks of a process that has torch."""
    python = forks.python()
    for name, words in PROGRAMS.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} {words} "$@"\n')
        program.chmod(0o755)
    source = str(Path(stayfinite.__file__).parents[1])
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(
            [source, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        ),
        "COLUMNS": "100",
        "PYTHONWARNINGS": "ignore",
    }


@pytest.mark.parametrize(
    "page", [page for page in PAGES if parts(page)], ids=lambda page: page.stem
)
def test_page_can_be_done_from_an_empty_folder(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    env = environment(tmp_path_factory.mktemp("bin"))
    for kind, title, text in parts(page):
        if kind == "python":
            for package in re.findall(r"^(?:from|import) (lightning|transformers)", text, re.M):
                pytest.importorskip(package, reason=f"{package} is not installed")
        if title:
            (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / title).write_text(text, encoding="utf-8")
            continue
        for command, expected in typed(text):
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            said = f"$ {command}\n{done.stdout}"
            missing = is_said(expected, done.stdout)
            assert missing is None, f"{missing!r} is not said, or not there:\n{said}"
            assert done.returncode == 0 or expected, said
