"""`stayfinite cause`: the page of a cause, from the source and from an installed package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stayfinite.causes import CAUSES
from stayfinite.cli import main
from stayfinite.cli.cause import INSTALLED

ROOT = Path(__file__).parents[2]


def said(*words: str, **options: Any) -> Any:
    return CliRunner().invoke(main, ["cause", *words], **options)


@pytest.mark.parametrize("slug", sorted(CAUSES))
def test_every_cause_has_its_page(slug: str) -> None:
    done = said(slug)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"# {CAUSES[slug].title}\n")
    assert "## Why" in done.stdout


def test_without_a_name_all_are_listed() -> None:
    lines = said().stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(CAUSES)
    assert all(line.endswith(CAUSES[line.split()[0]].title) for line in lines)


def test_unknown_cause_is_one_line_that_helps() -> None:
    done = said("log_of_zeros")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "Did you mean log_of_zero? `stayfinite cause` lists all" in done.stderr
    assert "Did you mean" not in said("xyz").stderr


def test_links_to_other_pages_become_names() -> None:
    assert "softmax_all_masked" in said("mask_value_overflow").stdout
    assert ".md)" not in said("mask_value_overflow").stdout


def test_on_a_terminal_it_is_laid_out() -> None:
    done = said("log_of_zero", env={"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"})
    assert "\x1b[" in done.stdout
    assert "## Why" not in done.stdout
    assert "```" not in done.stdout


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from stayfinite.cli import main; main()"
    run_python(["-c", code, "cause", "log_of_zero"], ROOT / "src")


def run_python(words: list[str], path: Path) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(path)},
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_package_as_it_is_installed_has_the_pages(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wheel = tomllib.loads(text)["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"docs/causes": f"stayfinite/{INSTALLED}"}
    shutil.copytree(ROOT / "src" / "stayfinite", tmp_path / "stayfinite")
    for source, target in wheel["force-include"].items():
        shutil.copytree(ROOT / source, tmp_path / target)
    page = run_python(["-m", "stayfinite", "cause", "log_of_zero"], tmp_path)
    assert page.startswith("# Logarithm of zero\n")


def test_wheel_has_the_pages(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    made = next(
        builder.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    )
    names = zipfile.ZipFile(made).namelist()
    assert {f"stayfinite/{INSTALLED}/{slug}.md" for slug in CAUSES} <= set(names)
    assert not any(name.startswith(("tests/", "docs/")) for name in names)
