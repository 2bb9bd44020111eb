"""The resume bug end to end: a scale factor that state_dict() leaves out is refused or restored."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import fingerprint, values_only
from click.testing import CliRunner

from stayfinite.checkpoint import load_checkpoint, save_checkpoint
from stayfinite.cli import main
from stayfinite.errors import CheckpointError

CASE = Path(__file__).parents[1] / "cases_own" / "radar-latent-scale"
FINETUNE = Path(__file__).parents[1] / "cases" / "finetune-scale-factor-lost"


@pytest.fixture
def script() -> Iterator[Any]:
    """The case's functions; its settings of torch are undone."""
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    spec = importlib.util.spec_from_file_location("radar_latent_scale", CASE / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)
    torch.set_rng_state(generator)


def first_night(script: Any) -> tuple[Any, Any, torch.Generator, int]:
    generator = torch.Generator().manual_seed(4)
    model, optimizer = script.build()
    model.measure(script.tiles(32, generator))
    return model, optimizer, generator, script.night(model, optimizer, generator, 0)


def losses(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines()]


def test_file_without_the_factor_is_refused_and_the_key_is_named(
    script: Any, tmp_path: Path
) -> None:
    model, optimizer, _, step = first_night(script)
    path = tmp_path / "radar.pt"
    script.save(path, model, optimizer, step)
    model, optimizer = script.build()
    before = fingerprint(model), fingerprint(optimizer)
    with pytest.raises(CheckpointError, match=r"model\.scale_factor: is not in the file") as error:
        load_checkpoint(path, model=model, optimizer=optimizer)
    assert [problem.key for problem in error.value.problems] == ["model.scale_factor"]
    assert (fingerprint(model), fingerprint(optimizer)) == before


def test_resumed_with_our_file_it_trains_on_as_if_it_had_not_stopped(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer, generator, step = first_night(script)
    path = save_checkpoint(tmp_path / "radar.ckpt", model=model, optimizer=optimizer, step=step)
    state = generator.get_state()
    capsys.readouterr()
    script.night(model, optimizer, generator, step)
    expected = losses(capsys.readouterr().out)

    resumed, resumed_optimizer = script.build()
    loaded = load_checkpoint(path, model=resumed, optimizer=resumed_optimizer)
    script.night(resumed, resumed_optimizer, generator.set_state(state), loaded.step)
    assert losses(capsys.readouterr().out) == expected
    assert all(map(math.isfinite, expected))
    assert values_only(fingerprint(resumed)) == values_only(fingerprint(model))


def test_check_command_names_the_key_too(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, _, step = first_night(script)
    script.save(tmp_path / "radar.pt", model, optimizer, step)
    (tmp_path / "radar_of_the_test.py").write_text((CASE / "train.py").read_text())
    monkeypatch.chdir(tmp_path)
    words = ["check", "radar.pt", "--model", "radar_of_the_test:RadarDiffusion", "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert (problem["kind"], problem["key"]) == ("missing", "model.scale_factor")


@pytest.fixture
def second_cohort() -> Iterator[dict[str, Any]]:
    """The functions of a case whose factor is None until it is measured; without its main part."""
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    source = (FINETUNE / "train.py").read_text()
    functions: dict[str, Any] = {}
    exec(compile(source[: source.index("\ng = torch.Generator")], "train.py", "exec"), functions)
    yield functions
    torch.set_num_threads(threads)
    torch.set_rng_state(generator)


def test_factor_that_is_measured_once_goes_with_our_file(
    second_cohort: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build, run, cohort = (second_cohort[name] for name in ("build", "run", "cohort"))
    data = torch.Generator().manual_seed(7)
    model, optimizer, step = build()
    step = run(model, optimizer, cohort(48, data, margin=0), step)
    theirs = tmp_path / "ldm.pt"
    torch.save({"model": model.state_dict(), "opt": optimizer.state_dict(), "step": step}, theirs)
    ours = save_checkpoint(tmp_path / "ldm.ckpt", model=model, optimizer=optimizer, step=step)
    with pytest.raises(CheckpointError, match=r"model\.scale_factor: is not in the file"):
        load_checkpoint(theirs, model=model, optimizer=optimizer)

    following = cohort(48, data, margin=6)
    for path, is_finite in ((None, False), (ours, True)):
        capsys.readouterr()
        resumed, resumed_optimizer, step = build(theirs)
        if path is not None:
            load_checkpoint(path, model=resumed, optimizer=resumed_optimizer)
            assert torch.equal(resumed.scale_factor, model.scale_factor)
        run(resumed, resumed_optimizer, following, step)
        assert all(map(math.isfinite, losses(capsys.readouterr().out))) is is_finite
