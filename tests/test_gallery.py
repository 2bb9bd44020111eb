"""Two quick programs of the gallery; `make gallery` runs all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

GALLERY = Path(__file__).parents[1] / "gallery"
sys.path.append(str(GALLERY))

import run as gallery  # noqa: E402

ALL = gallery.programs()


def test_there_are_twenty_programs_with_a_truth_that_points_at_a_line() -> None:
    assert len(ALL) >= 20
    for program in ALL:
        lines = (program.folder / program.truth["file"]).read_text().splitlines()
        assert lines[program.truth["line"] - 1].strip(), program.name


@pytest.mark.parametrize("name", ["ignite-regression", "nanogpt"])
def test_a_program_is_unharmed_and_its_bug_found(name: str, tmp_path: Path) -> None:
    program = next(each for each in ALL if each.name == name)
    found = gallery.examined(program, tmp_path, having=())
    assert all(found[key] for key in gallery.HEADINGS), found
