"""What the docs take from the code is as the code is now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["api.md", "cli.md"])
def test_page_is_as_the_code_is_now(generate: ModuleType, name: str) -> None:
    page = ROOT / "docs" / name
    assert page.read_text(encoding="utf-8") == generate.pages()[page], (
        "Write it again with `python docs/generate.py`."
    )


def test_a_command_without_a_section_gets_one(generate: ModuleType) -> None:
    page = generate.cli_page("# Command line\n")
    assert "\n## run\n\n<!-- options of run -->\n```text\nstayfinite run [OPTIONS]" in page
