"""The site: every page is in the menu, it builds without a warning, links lead somewhere."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).parents[2]
PAGES = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}
NEEDED = ("mkdocs.yml", "CHANGELOG.md")


def pages_in(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_in(item)


def test_every_page_is_in_the_menu_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(pages_in(config["nav"])) == sorted(PAGES)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not importlib.util.find_spec("zensical"):
        pytest.skip("zensical is not installed")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in NEEDED:
        shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    return folder / "site"


class Links(HTMLParser):
    """The ids of a page, and what it links to or shows."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if name in ("href", "src") and value:
                self.targets.append(value)


@pytest.mark.xdist_group("site")
def test_site_has_every_page(site: Path) -> None:
    for page in PAGES:
        name = page.removesuffix(".md")
        folder = "" if name == "index" else name.removesuffix("/index")
        assert (site / folder / "index.html").is_file(), page


@pytest.mark.xdist_group("site")
def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    pages = {page: Links(page) for page in site.rglob("index.html")}
    assert dead_links(site, pages) == []


def dead_links(site: Path, pages: dict[Path, Links]) -> list[str]:
    dead = []
    for page, links in pages.items():
        for target in links.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            file = (page.parent / unquote(url.path)).resolve() if url.path else page
            file = file / "index.html" if file.is_dir() else file
            is_there = file.is_file() and file.is_relative_to(site.resolve())
            has_anchor = not url.fragment or file.suffix != ".html" or file not in pages
            if not is_there or not (has_anchor or url.fragment in pages[file].ids):
                dead.append(f"{page.parent.name}: {target}")
    return dead
