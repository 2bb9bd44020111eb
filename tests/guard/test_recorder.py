"""Training that is recorded: the record is true, and training does not notice."""

from __future__ import annotations

import math
import os
from pathlib import Path

import forks
import pytest
import torch
from torch import Tensor, nn

import stayfinite
from stayfinite.guard.recorder import Recorder
from stayfinite.report.store.reading import Run, read_run, runs_in

SOURCE = Path(__file__).parents[2] / "src"


def train(run_dir: Path | None, *, steps: int = 40, bad: int | None = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with stayfinite.watch(model, optimizer, sinks=[], run_dir=run_dir):
        for number in range(steps):
            optimizer.zero_grad()
            x = torch.rand(16, 4)
            if number == bad:
                x[0, 0] = torch.nan
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    return model.state_dict()


def test_recorded_training_is_the_same_to_the_byte(tmp_path: Path) -> None:
    plain, recorded = train(None), train(tmp_path / "a")
    for name, value in plain.items():
        assert value.numpy().tobytes() == recorded[name].numpy().tobytes()


def test_every_step_is_recorded_and_samples_have_layers(tmp_path: Path) -> None:
    train(tmp_path / "a")
    run = read_run(tmp_path / "a")
    series = run.series
    assert series["step"] == list(range(40))
    assert all(math.isfinite(loss) for loss in series["loss"])
    assert series["lr"] == [0.01] * 40
    assert [sample.step for sample in series.samples] == [0, 16, 32]
    assert series.layers[0] == "0.weight"
    for sample in series.samples:
        total = math.hypot(*(norm for norm in sample.norms if norm is not None))
        assert series["norm"][sample.step] == pytest.approx(total, rel=1e-5)
        assert all(0 < room < 280 for room in sample.headroom if room is not None)
    assert run.exit == "finite"
    assert run.info.seed == 0


def test_a_step_that_was_left_out_is_marked(tmp_path: Path) -> None:
    train(tmp_path / "a", bad=10)
    run = read_run(tmp_path / "a")
    assert [n for n, skipped in enumerate(run.series["skipped"]) if skipped] == [10]
    assert [n for n, loss in enumerate(run.series["loss"]) if math.isnan(loss)] == [10]
    (incident,) = run.incidents
    assert incident.step == 10
    assert run.exit == "incident"


def test_a_second_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    train(tmp_path / "a", steps=3)
    train(tmp_path / "a", steps=5)
    assert [read_run(tmp_path / name).steps for name in ("a", "a-2")] == [3, 5]


def test_two_optimizers_are_two_series(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    one = torch.optim.SGD(first.parameters(), lr=0.1)
    two = torch.optim.SGD(second.parameters(), lr=0.2)
    with stayfinite.watch(first, one, sinks=[], run_dir=tmp_path / "a"):
        for _ in range(3):
            for model, optimizer in ((first, one), (second, two)):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    (rank,) = read_run(tmp_path / "a").ranks
    assert [series["lr"] for series in rank.series.values()] == [[0.1] * 3]


def test_terms_that_somebody_checks_are_recorded(tmp_path: Path) -> None:
    model, detector = nn.Linear(2, 1), stayfinite.NaNDetector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with stayfinite.watch(model, optimizer, sinks=[], run_dir=tmp_path / "a"):
        for step in range(3):
            terms = {"near": model(torch.ones(1, 2)).sum() * 0 + step, "far": torch.tensor(2.0)}
            if step < 2:
                detector.check_losses(terms)
            optimizer.zero_grad()
            sum(terms.values()).backward()
            optimizer.step()
    assert read_run(tmp_path / "a").series.terms == {
        "far": [2.0, 2.0, None],
        "near": [0.0, 1.0, None],
    }


def test_an_error_of_the_recorder_ends_the_record_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Recorder, "_sample", fail)
    recorded = train(tmp_path / "a")
    monkeypatch.undo()
    assert caplog.text.count("stops recording this run") == 1
    assert all(torch.equal(value, recorded[name]) for name, value in train(None).items())


SCRIPT = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    x = torch.rand(4, 2) - (1.0 if step == 12 else 0.0)
    optimizer.zero_grad()
    model(torch.sqrt(x + 0.01)).square().mean().backward()
    optimizer.step()
"""


def run_script(folder: Path, *options: str) -> tuple[int, list[Path]]:
    """Exit code and recorded runs; whoever records says where."""
    (folder / "train.py").write_text(SCRIPT)
    done = forks.run_text(
        ["-m", "stayfinite", "run", "--prove", "0", *options, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    runs = runs_in(folder / "stayfinite-runs")
    names = [f"stayfinite: recorded in stayfinite-runs/{path.name}; " for path in runs]
    assert all(name in done.stderr for name in names)
    return done.returncode, runs


def test_run_records_and_the_second_run_explains(tmp_path: Path) -> None:
    code, (path,) = run_script(tmp_path)
    assert code == 3
    run: Run = read_run(path)
    assert run.steps == 12
    (incident,) = run.incidents
    assert incident.origin is not None
    assert incident.origin.line == 8
    assert run.exit == "incident"
    assert run.info.command == ("train.py",)
    assert list(run.info.sources) == ["train.py"]


def test_run_records_where_it_is_told_or_not_at_all(tmp_path: Path) -> None:
    assert run_script(tmp_path, "--no-record", "--second-run", "never") == (3, [])
    code, found = run_script(tmp_path, "--run-dir", "here", "--second-run", "never")
    assert (code, found) == (3, [])
    assert read_run(tmp_path / "here").steps == 12
    assert run_script(tmp_path, "--run-dir", "here")[0] == 2


HEALTHY = SCRIPT.replace("step == 12", "step == 99")
BY_HAND = """
import torch
weight = torch.ones(2, requires_grad=True)
for step in range(30):
    loss = (weight * torch.rand(4, 2)).sum().square()
    loss.backward()
    with torch.no_grad():
        weight -= 0.001 * weight.grad
    weight.grad = None
"""


def run_of(folder: Path, script: str, *options: str) -> str:
    (folder / "train.py").write_text(script)
    done = forks.run_text(
        ["-m", "stayfinite", "run", "--prove", "0", *options, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr
    return str(done.stderr)


def test_a_short_healthy_run_leaves_nothing(tmp_path: Path) -> None:
    run_of(tmp_path, HEALTHY)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["train.py"]


def test_a_run_that_is_asked_for_is_kept(tmp_path: Path) -> None:
    run_of(tmp_path, HEALTHY, "--run-dir", "kept")
    assert read_run(tmp_path / "kept").steps == 20
    assert not (tmp_path / "kept" / ".gitignore").exists()


def test_the_folder_of_runs_is_ignored_by_git(tmp_path: Path) -> None:
    run_script(tmp_path)
    assert (tmp_path / "stayfinite-runs" / ".gitignore").read_text() == "*\n"


def test_a_loop_without_an_optimizer_is_recorded(tmp_path: Path) -> None:
    run_of(tmp_path, BY_HAND, "--run-dir", "kept")
    series = read_run(tmp_path / "kept").series
    assert series["step"] == list(range(30))
    assert all(loss is not None for loss in series["loss"])
