"""`run --capsule` on a real bug, and its replay after the script is gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import forks
import pytest
from click.testing import CliRunner

import stayfinite
from stayfinite.capsule import read_capsule
from stayfinite.cli import main
from stayfinite.explain.experiments import Budget
from stayfinite.records import Incident, RunResult, TensorSummary
from stayfinite.runner.capsules import deliver, wish_of
from stayfinite.runner.case import Case
from stayfinite.runner.options import RunOptions, Scene
from stayfinite.runner.plan import Plan, ProcessRecord
from stayfinite.runner.script import Target
from stayfinite.runner.seeds import write_seeds
from stayfinite.settings import GuardSettings

CASES = Path(__file__).parents[1] / "cases"
SOURCE = str(Path(stayfinite.__file__).resolve().parents[1])


def start(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    given = ["-m", "stayfinite", *words]
    return forks.run_text(given, cwd=cwd, env={**os.environ, "PYTHONPATH": SOURCE})


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capsule of a real script, in a folder of its own; the script is no more."""
    there, here = tmp_path_factory.mktemp("there"), tmp_path_factory.mktemp("here")
    work = there / "project"
    work.mkdir()
    shutil.copy(CASES / "ciou-flat-proposal" / "train.py", work)
    words = ("run", "--no-record", "--prove", "0", "--capsule", str(here / "a.capsule"))
    done = start(*words, "project/train.py", cwd=there)
    assert done.returncode == 3, done.stderr
    assert "stayfinite replay" in done.stderr
    shutil.rmtree(work)
    return here / "a.capsule"


def test_same_operation_line_and_value_come_again_elsewhere(sent: Path) -> None:
    truth = json.loads((CASES / "ciou-flat-proposal" / "truth.json").read_text())
    done = CliRunner().invoke(main, ["replay", "--trust", "--json", str(sent)])
    assert done.exit_code == 0, done.output
    text = done.output[done.output.index("{") :]
    found = {each["what"]: each for each in json.loads(text)["compared"]}
    assert all(each["same"] for each in found.values())
    assert found["line"]["here"] == f"train.py:{truth['line']}"
    assert truth["op"] in found["operation"]["here"]
    assert os.listdir(sent.parent) == ["a.capsule"]


def test_it_holds_what_it_takes_and_no_data(sent: Path) -> None:
    capsule = read_capsule(sent)
    assert [each.name for each in capsule.sources] == ["project/train.py"]
    assert capsule.code.command == ("project/train.py",)
    assert capsule.code.folder == "project"
    assert "seeds-main.json" in capsule.seeds
    assert capsule.batch == ()
    assert capsule.birth is not None
    assert capsule.birth.forward is not None
    assert any(isinstance(v, TensorSummary) for v in capsule.birth.operation.arguments.values())
    assert capsule.state is not None
    assert capsule.state.tensors
    assert capsule.versions["torch"]
    assert capsule.incident.diagnosis is not None


def test_a_wish_that_makes_no_sense_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "notes.txt").write_text("mine")
    for words in (["--with-batch"], ["--capsule", "none/a"], ["--capsule", "notes.txt"]):
        done = start("run", *words, "train.py", cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "it ran" not in done.stderr
        assert done.stderr.count("\n") == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_without_a_second_run_it_still_replays_the_script(tmp_path: Path) -> None:
    """Then nobody has seen the operation; the source, the command and the seeds are there."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("print('hello')")
    (tmp_path / "plan").mkdir()
    write_seeds(str(tmp_path / "plan"), {"seeds-main.json": {"torch": [7]}})
    options = RunOptions(capsule=str(tmp_path / "a.capsule"), second_run="never")
    target = Target(name=str(work / "train.py"), args=("--lr", "1"))
    plan = Plan(
        folder=str(tmp_path / "plan"),
        guard=GuardSettings(folder=str(work)),
        command=tuple(target.command),
        capsule=wish_of(options, str(tmp_path)),
    )
    scene = Scene(target=target, options=options, plan=plan, cwd=str(tmp_path))
    incident = Incident(step=3)
    record = ProcessRecord(pid=1, result=RunResult(incidents=(incident,)), seconds=30.0, arm_at=40)
    case = Case(scene=scene, records=[record], result=record.result, budget=Budget(0.0))
    notes = deliver(case).notes
    assert "stayfinite replay a.capsule" in notes[0]
    capsule = read_capsule(tmp_path / "a.capsule")
    assert capsule.code.command == ("work/train.py", "--lr", "1")
    assert ("work/train.py", b"print('hello')") in [(s.name, s.text) for s in capsule.sources]
    assert capsule.seeds == {"seeds-main.json": {"torch": [7]}}
    assert (capsule.config["arm_at"], capsule.config["seconds"]) == (40, 30.0)
    assert capsule.birth is None
    assert str(tmp_path) not in json.dumps(capsule.config)
