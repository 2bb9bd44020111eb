"""README and docs: every Python snippet runs, every link leads somewhere."""

from __future__ import annotations

import re
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from stayfinite.errors import PackageError

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CAUSES = ROOT / "docs" / "causes"  # their snippets are to fail and to hold: test_cause_pages.py
SNIPPET = re.compile(r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def snippets() -> list[Any]:
    return [
        pytest.param(textwrap.dedent(found["code"]), id=f"{name_of(page)}-{number}")
        for page in PAGES
        if page.parent != CAUSES
        for number, found in enumerate(SNIPPET.finditer(page.read_text(encoding="utf-8")))
    ]


def anchors(page: Path) -> set[str]:
    """Those that the headings get on GitHub; tests/docs/test_site.py asks for those of the site."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_readme_has_a_snippet() -> None:
    assert "```python" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", snippets())
def test_snippet_runs(
    code: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in re.findall(r"^(?:from|import) (\w+)", code, re.M):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    # Of what is new in torch, and of loaders without workers; pytest undoes it.
    warnings.filterwarnings("ignore", module=r"lightning\.")
    try:
        exec(compile(code, request.node.callspec.id, "exec"), {"__name__": "snippet"})
    except PackageError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.is_file(), target
        assert not anchor or anchor in anchors(file), anchor


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"\b((?:benchmarks|examples|src|tests)/[\w/.-]*\w)", text)
    if page.name == "architecture.md":
        named += [f"src/stayfinite/{name}" for name in re.findall(r"`((?:\w+/)+\w+\.py)`", text)]
        named = [name for name in named if not name.startswith("src/stayfinite/tests/")]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_install_is_with_the_versions_that_are_tested() -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert "$ pip install --constraint constraints.txt .\n" in text


def test_readme_names_the_required_torch() -> None:
    needed = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tested = re.search(r"^torch==([\d.]+)\.0$", (ROOT / "constraints.txt").read_text(), re.M)
    assert needed
    assert tested
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"torch {needed[1]} or newer" in text
    assert f"tested with torch {tested[1]}" in text
