"""What the docs take from the code is as the code is now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from stayfinite.causes import CAUSES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = ["docs/api.md", "docs/cli.md", "docs/causes/index.md", "mkdocs.yml"]


@pytest.mark.parametrize("name", PAGES)
def test_page_is_as_the_code_is_now(generate: ModuleType, name: str) -> None:
    page = ROOT / name
    assert page.read_text(encoding="utf-8") == generate.pages()[page], (
        "Write it again with `python docs/generate.py`."
    )


def test_a_new_cause_is_listed_below_the_last_one_of_its_kind(generate: ModuleType) -> None:
    row = "- {0.slug}"
    lines = [row.format(cause) for cause in CAUSES.values()]
    lacking = [line for line in lines if line != "- bad_label"]
    found = generate.with_new_causes("\n".join(lacking), row).splitlines()
    assert sorted(found) == sorted(lines)
    assert found[found.index("- bad_label") - 1] == "- unnormalized_input"


def test_a_command_without_a_section_gets_one(generate: ModuleType) -> None:
    page = generate.cli_page("# Command line\n")
    assert "\n## run\n\n<!-- options of run -->\n```text\nstayfinite run [OPTIONS]" in page
