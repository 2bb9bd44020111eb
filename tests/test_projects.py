"""Whole projects, which write logs and checkpoints: the line is exact without a second run."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
from hypothesis import settings

IS_PROOF = settings.default.max_examples >= 5_000
WATCH = Path(__file__).parent / "support" / "watch_around.py"

PROJECTS = Path(__file__).parent / "projects"
ALL = sorted(path.parent for path in PROJECTS.glob("*/truth.json"))
# Their logs carry times, and two runs of them do not make the same numbers.
_TIMED = ("events.out.tfevents", ".log", "log.txt")


def run(project: Path, folder: Path, *options: str) -> dict[str, Any]:
    shutil.copytree(project, folder, ignore=shutil.ignore_patterns("fixed", "truth.json"))
    result = folder.parent / f"{folder.name}.json"
    command = ["-m", "stayfinite", "run", "--no-record", "--json", str(result)]
    forks.run([*command, "--second-run", "never", "--prove", "0", *options, "train.py"], cwd=folder)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], tuple[Path, dict[str, Any]]]:
    """The folder in which a project was run, once for all tests, and what was found."""

    @functools.cache
    def once(project: Path) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(project.name) / "project"
        return folder, run(project, folder)

    return once


def places(truth: dict[str, Any]) -> set[str]:
    lines = [truth["line"], *truth.get("line_alt", [])]
    return {f"{truth['file']}:{line}" for line in lines} | set(truth.get("place_alt", []))


def files_in(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {
        str(path.relative_to(folder)): b"" if any(t in path.name for t in _TIMED) else _bytes(path)
        for path in paths
        if not path.name.startswith("events.out")
    }


def _bytes(path: Path) -> bytes:
    return path.read_bytes()


@pytest.mark.parametrize("project", ALL, ids=lambda path: path.name)
def test_the_line_is_exact_at_the_first_failure(project: Path, ran: Any) -> None:
    truth = json.loads((project / "truth.json").read_text())
    found = ran(project)[1]["incidents"]
    origin = found[0]["origin"]
    assert origin["exact"], found[0]
    span = range(origin["line"], (origin["end_line"] or origin["line"]) + 1)
    assert places(truth) & {f"{origin['file']}:{line}" for line in span}, origin


# Seeded, and without times in what they write.
@pytest.mark.parametrize("name", ["fcos-tiny", "retro-lm", "cliff-awac", "store-forecast"])
def test_files_are_those_of_a_run_in_which_nothing_is_run_again(
    name: str, ran: Any, tmp_path: Path
) -> None:
    run(PROJECTS / name, tmp_path / "project", "--again", "never")
    assert files_in(ran(PROJECTS / name)[0]) == files_in(tmp_path / "project")


# One of them has no optimizer to be watched.
WATCHED = [path for path in ALL if path.name != "private-rec"]
SOME = [path for path in ALL if path.name in ("house-mlp", "fcos-tiny", "retro-lm")]


@pytest.mark.parametrize("on_nan", ["stop", "recover"])
@pytest.mark.parametrize("project", WATCHED if IS_PROOF else SOME, ids=lambda path: path.name)
def test_watch_around_it_gives_the_same_line(project: Path, on_nan: str, tmp_path: Path) -> None:
    truth = json.loads((project / "truth.json").read_text())
    folder, result = tmp_path / "project", tmp_path / "found.json"
    shutil.copytree(project, folder, ignore=shutil.ignore_patterns("fixed", "truth.json"))
    forks.run([str(WATCH), on_nan, str(result), "train.py"], cwd=folder)
    origin = json.loads(result.read_text())[0]["origin"]
    assert origin["exact"]
    span = range(origin["line"], (origin["end_line"] or origin["line"]) + 1)
    assert places(truth) & {f"{origin['file']}:{line}" for line in span}, origin


def test_there_are_ten_projects() -> None:
    assert len(ALL) == 10
