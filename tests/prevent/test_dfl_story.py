"""The detector whose box loss is -log(p): found, its term named, and trained through with ours."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from case_runs import cases_in, judge
from torch import Tensor

import stayfinite
from stayfinite import AMPConfig, AMPTrainer, NaNDetector, clip_gradients, init_head

CASE = Path(__file__).parents[1] / "cases_own" / "parcel-detector-dfl"
STEPS = 30
WEIGHTS = {"box": 7.5, "cls": 0.5, "dfl": 1.5}


@pytest.fixture
def script() -> Iterator[Any]:
    """The case's functions; its settings of torch are undone."""
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    yield loaded("train")
    torch.set_num_threads(threads)
    torch.set_rng_state(generator)


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"parcel_detector_{name}", CASE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def named(terms: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {
        name: weight * term for (name, weight), term in zip(WEIGHTS.items(), terms, strict=True)
    }


def loss_fn(script: Any) -> Any:
    """The script's three terms, outside of autocast as there."""

    def terms(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        (cls, reg), (labels, boxes) = outputs, targets
        with torch.autocast("cpu", enabled=False):
            cells, sides = script.assign(boxes)
            dist = reg[torch.arange(len(cells)), cells]
            return named(
                (
                    script.box_loss(dist, sides),
                    script.cls_loss(cls, cells, labels),
                    script.dfl_loss(dist, sides),
                )
            )

    return terms


def test_run_names_the_line_and_the_cause(watched: Any) -> None:
    (case,) = cases_in([CASE])
    finished = watched(CASE / "train.py")
    wrong = [aspect for aspect, is_right in judge(case, finished.incidents).items() if not is_right]
    assert wrong == ["rank"], finished.err  # of one process there is nothing to say
    assert "dfl_loss" in finished.err


def test_the_repaired_script_is_left_in_peace(watched: Any) -> None:
    finished = watched(CASE / "train_fixed.py")
    assert finished.code == 0, finished.err
    assert not finished.incidents


def test_detector_names_the_term(script: Any) -> None:
    model, belt, detector = script.Detector(), script.Belt(3), NaNDetector()
    batches = (named(script.losses(model, *belt.batch())) for _ in range(STEPS))
    found = next(filter(None, map(detector.check_losses, batches)))
    assert [report.location for report in found] == ["loss.dfl"]


def test_trainer_names_the_term_and_the_line(script: Any) -> None:
    model, belt = script.Detector(), script.Belt(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = AMPConfig(precision="fp16")
    with AMPTrainer(config, model, optimizer, loss_fn(script)) as trainer:
        for _ in range(STEPS):
            images, *targets = belt.batch()
            trainer.training_step((images, tuple(targets)))
            if trainer.incidents:
                break
    incident = trainer.incidents[0]
    terms = [report.location for report in incident.reports if report.location.startswith("loss.")]
    assert terms == ["loss.dfl"]
    assert incident.origin is not None
    assert (incident.origin.op, incident.origin.line) == ("aten.log.default", 59)
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_with_our_loss_and_head_it_trains_through(script: Any) -> None:
    """Clipping comes after unscaling, where its limit is one of true gradients."""
    model, belt = script.Detector(), script.Belt(3)
    script.dfl_loss = stayfinite.dfl_loss
    init_head(model.reg)
    init_head(model.cls, prior=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    seen: list[dict[str, float]] = []
    for _ in range(STEPS):
        terms = named(script.losses(model, *belt.batch()))
        optimizer.zero_grad()
        scaler.scale(torch.stack([*terms.values()]).sum()).backward()
        scaler.unscale_(optimizer)
        clipped = clip_gradients(model, 10.0)
        scaler.step(optimizer)
        scaler.update()
        assert math.isfinite(clipped.norm)
        assert not clipped.dropped
        seen.append({name: term.item() for name, term in terms.items()})
    assert scaler.get_scale() == 256.0  # nothing was skipped
    for name in WEIGHTS:
        first, last = (sum(step[name] for step in part) for part in (seen[:5], seen[-5:]))
        assert math.isfinite(sum(step[name] for step in seen))
        assert last < first, name
    assert seen[0]["dfl"] == pytest.approx(WEIGHTS["dfl"] * math.log(script.BINS), rel=0.05)


def test_our_loss_is_that_of_the_repaired_script(script: Any) -> None:
    repaired = loaded("train_fixed")
    logits = torch.linspace(-30, 30, 6 * 4 * script.BINS).reshape(6, 4, script.BINS)
    sides = torch.linspace(0, script.BINS - 1.01, 24).reshape(6, 4)
    torch.testing.assert_close(stayfinite.dfl_loss(logits, sides), repaired.dfl_loss(logits, sides))
