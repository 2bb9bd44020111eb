"""A change of the source is tried on the bad step up to its update."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stayfinite.errors import TrainingAbortedError
from stayfinite.guard import Guard, GuardSettings, loop_trials
from stayfinite.patch.edit import Patch

SCRIPT = """
import torch

def encode(x):
    return x.sqrt()

def train(is_accumulated):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for step in range(8):
        x = torch.tensor([0.0, -1.0]) if step == 5 else torch.ones(2)
        loss = encode(weight * x).mean()
        loss.backward()
        if not is_accumulated or step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
"""
# Finite at -1, but its derivative at 0 is not; and one that holds.
LOSS_ONLY = "x.clamp_min(0.0).sqrt()"
HOLDS = "x.clamp_min(1e-6).sqrt()"


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[[bool], None]]:
    file = tmp_path / "train_on_negatives.py"
    file.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.train
    del sys.modules[file.stem]


@pytest.mark.parametrize("is_accumulated", [False, True])
def test_a_change_that_leaves_the_gradients_bad_is_not_shown(
    train: Callable[[bool], None],
    is_accumulated: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, tried = str(tmp_path / "train_on_negatives.py"), []

    def patches_for(*args: object, **options: object) -> Iterator[Patch]:
        for text in (LOSS_ONLY, HOLDS):
            tried.append(text)
            after = SCRIPT.replace("x.sqrt()", text)
            yield Patch(file=file, before=SCRIPT, after=after, what="Clamp it.")

    monkeypatch.setattr(loop_trials, "patches_for", patches_for)
    guard = Guard(GuardSettings(on_nan="stop", folder=str(tmp_path), change_seconds=20))
    guard.attach()
    try:
        with pytest.raises(TrainingAbortedError) as caught:
            train(is_accumulated)
    finally:
        guard.close()
    incident = caught.value.incident
    assert incident is not None
    assert incident.diagnosis is not None
    assert tried == [LOSS_ONLY, HOLDS]
    assert f"+    return {HOLDS}" in (incident.diagnosis.patch or "")
