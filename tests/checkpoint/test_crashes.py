"""A process that is killed while it saves leaves the old checkpoint or the new one, whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import IS_PROOF

import stayfinite

DRIVER = Path(__file__).with_name("crash_driver.py")
SOURCE = Path(stayfinite.__file__).resolve().parents[1]
KILLS = 200 if IS_PROOF else 40

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def driven(*words: str, folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(DRIVER), *words, str(folder / "run")],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def at_boundaries(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What is left after a kill before, within and after each call of a save."""
    return driven("boundaries", folder=tmp_path_factory.mktemp("boundaries"))


@pytest.mark.xdist_group("boundaries")
def test_kill_at_every_boundary_leaves_the_old_or_the_new_file(at_boundaries: Any) -> None:
    results = at_boundaries
    calls = {result["call"].split()[1] for result in results}
    assert {"write", "fsync", "link", "replace", "preadv", "unlink"} <= calls
    for result in results:
        assert result["killed"], result
        assert result["step"] in (2, 3), result
    steps = [result["step"] for result in results]
    assert steps == sorted(steps), "once it is the new one it stays the new one"
    assert set(steps) == {2, 3}


@pytest.mark.xdist_group("boundaries")
def test_kill_at_every_boundary_leaves_two_good_generations(at_boundaries: Any) -> None:
    for result in at_boundaries:
        assert len(result["good"]) >= 2, result
        assert "last.ckpt" in result["good"], result
        assert result["latest"] == "last.ckpt", result
        # The next save works, and nothing is left of the killed one.
        assert result["next"] == [result["step"] + 1, result["step"]], result
        assert result["after"] == ["last.ckpt", "last.ckpt.1"], result


def test_random_kills_never_leave_neither(tmp_path: Path) -> None:
    results = driven("random", str(KILLS), folder=tmp_path)
    assert len(results) == KILLS
    for result in results:
        assert result["killed"], result
        assert result["step"] >= result["first"] - 1, result
        assert len(result["good"]) >= 2, result
    assert results[-1]["latest"] == "last.ckpt"
    assert results[-1]["after"] == ["last.ckpt", "last.ckpt.1"]
    # Else the kills came too early or too late to prove anything.
    assert any(result["step"] >= result["first"] for result in results)
    assert any(any(name.endswith(".saving") for name in result["all"]) for result in results)
