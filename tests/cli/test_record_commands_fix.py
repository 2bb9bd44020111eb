"""`stayfinite fix`: what it shows, what it writes, and what it refuses to write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from recorded_runs import record

from stayfinite.cli import main
from stayfinite.patch.edit import unified_diff
from stayfinite.records import Diagnosis, Incident, Origin

BEFORE = "import torch\n\n\ndef nll(p):\n    return -torch.log(p).mean()\n"
AFTER = BEFORE.replace("(p)", "(p.clamp_min(1e-8))", 2).replace("nll(p.clamp_min(1e-8))", "nll(p)")
PROOF = "With this change: finite for all its 60 steps, loss 0.41."
FIX = "Keep it away from 0."


def fix(*words: str, answer: str | None = None) -> Result:
    done = CliRunner().invoke(main, ["fix", *words], input=answer, env={"COLUMNS": "100"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def recorded(tmp_path: Path, *, patch: str | None, folder: Path | None = None) -> str:
    """A run of PROJECT/train.py whose incident has this patch."""
    project = folder or tmp_path / "project"
    incident = Incident(
        step=20,
        origin=Origin(phase="forward", op="aten.log.default", file="train.py", line=5, exact=True),
        diagnosis=Diagnosis(cause="log_of_zero", why="w", fix=FIX, patch=patch, evidence=(PROOF,)),
    )
    config = {"folder": str(project)}
    return str(
        record(
            tmp_path / "runs" / "a",
            incidents=[incident],
            script=str(project / "train.py"),
            config=config,
        )
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    path = tmp_path / "project" / "train.py"
    path.write_text(BEFORE)
    return path


@pytest.fixture
def run(tmp_path: Path, script: Path) -> str:
    return recorded(tmp_path, patch=unified_diff(BEFORE, AFTER, name="train.py"))


def test_change_and_its_proof_are_shown_and_nothing_is_written(run: str, script: Path) -> None:
    done = fix(run)
    assert done.exit_code == 0
    assert "+    return -torch.log(p.clamp_min(1e-8)).mean()" in done.output
    assert PROOF in done.output
    assert "train.py:5, step 20: log_of_zero" in done.output
    assert f"stayfinite fix --write {run}" in done.output
    assert script.read_text() == BEFORE
    assert os.listdir(script.parent) == ["train.py"]


def test_write_asks_and_takes_no_for_an_answer(run: str, script: Path) -> None:
    done = fix("--write", run, answer="n\n")
    assert (done.exit_code, "Nothing was changed." in done.output) == (0, True)
    assert os.listdir(script.parent) == ["train.py"]
    assert script.read_text() == BEFORE


def test_write_changes_the_file_and_keeps_the_old_one(run: str, script: Path) -> None:
    script.chmod(0o750)
    done = fix("--write", run, answer="y\n")
    assert done.exit_code == 0, done.output
    assert script.read_text() == AFTER
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert script.with_name("train.py.orig").read_text() == BEFORE
    assert sorted(os.listdir(script.parent)) == ["train.py", "train.py.orig"]


def test_old_copies_are_never_overwritten(run: str, script: Path) -> None:
    (script.parent / "train.py.orig").write_text("mine")
    (script.parent / "train.py.orig.1").write_text("mine too")
    assert fix("--write", "--yes", run).exit_code == 0
    assert (script.parent / "train.py.orig").read_text() == "mine"
    assert (script.parent / "train.py.orig.1").read_text() == "mine too"
    assert (script.parent / "train.py.orig.2").read_text() == BEFORE


def test_without_an_answer_nothing_is_written(run: str, script: Path) -> None:
    assert fix("--write", run, answer="").exit_code == 1
    assert script.read_text() == BEFORE


@pytest.mark.parametrize(
    "now",
    [BEFORE.replace("mean", "sum"), "# a\n" + BEFORE, BEFORE[:20], AFTER],
    ids=["other line", "moved", "shorter", "applied already"],
)
def test_file_that_has_changed_is_left_alone(run: str, script: Path, now: str) -> None:
    script.write_text(now)
    done = fix("--write", "--yes", run)
    assert (done.exit_code, "nothing was changed" in done.output) == (2, True)
    assert script.read_text() == now
    assert os.listdir(script.parent) == ["train.py"]


def test_file_that_is_gone_or_not_utf_8_is_refused(run: str, script: Path) -> None:
    script.write_bytes(b"\xff\xfe" + BEFORE.encode())
    done = fix("--write", "--yes", run)
    assert (done.exit_code, "is not UTF-8" in done.output) == (2, True)
    script.unlink()
    done = fix("--write", "--yes", run)
    assert (done.exit_code, "does not exist" in done.output) == (2, True)


@pytest.mark.parametrize("name", ["../outside.py", "sub/../../outside.py"])
def test_file_outside_the_project_is_refused(tmp_path: Path, script: Path, name: str) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text(BEFORE)
    done = fix("--write", "--yes", recorded(tmp_path, patch=unified_diff(BEFORE, AFTER, name=name)))
    assert (done.exit_code, "outside the project" in done.output) == (2, True)
    assert outside.read_text() == BEFORE


def test_absolute_name_is_refused(tmp_path: Path, script: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text(BEFORE)
    patch = unified_diff(BEFORE, AFTER, name=str(outside))
    done = fix("--write", "--yes", recorded(tmp_path, patch=patch))
    assert (done.exit_code, "outside the project" in done.output) == (2, True)
    assert outside.read_text() == BEFORE


def test_link_that_leads_out_of_the_project_is_refused(run: str, script: Path) -> None:
    outside = script.parent.parent / "outside.py"
    outside.write_text(BEFORE)
    script.unlink()
    script.symlink_to(outside)
    done = fix("--write", "--yes", run)
    assert (done.exit_code, "outside the project" in done.output) == (2, True)
    assert outside.read_text() == BEFORE


def test_without_a_patch_the_fix_is_said_in_words(tmp_path: Path, script: Path) -> None:
    done = fix(recorded(tmp_path, patch=None))
    assert done.exit_code == 2
    assert "there is no patch" in done.output
    assert FIX in done.output


def test_healthy_run_has_nothing_to_fix(tmp_path: Path) -> None:
    done = fix(str(record(tmp_path / "runs" / "b")))
    assert (done.exit_code, "nothing to fix" in done.output) == (2, True)


def test_patch_cannot_command_the_terminal(tmp_path: Path, script: Path) -> None:
    patch = unified_diff("a\n", "\x1b[31mred\x1b]0;title\x07\n", name="train.py")
    assert "\x1b" not in fix(recorded(tmp_path, patch=patch)).output


def test_line_ends_stay_as_they_are(tmp_path: Path, script: Path) -> None:
    before, after = BEFORE.replace("\n", "\r\n"), AFTER.replace("\n", "\r\n")
    script.write_bytes(before.encode())
    run = recorded(tmp_path, patch=unified_diff(before, after, name="train.py"))
    assert fix("--write", "--yes", run).exit_code == 0
    assert script.read_bytes() == after.encode()


def test_broken_patch_is_refused(tmp_path: Path, script: Path) -> None:
    done = fix("--write", "--yes", recorded(tmp_path, patch="rm -rf"))
    assert (done.exit_code, "not a unified diff" in done.output) == (2, True)
