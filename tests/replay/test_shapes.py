"""The bad step of a loop that is not ours is run again in place, and nobody notices."""

import contextlib
import inspect
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

import stayfinite

sys.path.insert(0, str(Path(__file__).parent))
import shapes

NAMES = [shape.__name__ for shape in shapes.SHAPES]


def guilty_lines():
    lines = Path(shapes.__file__).read_text().splitlines()
    return {number for number, line in enumerate(lines, start=1) if line.endswith("# bad")}


def run(shape, folder, **options):
    """What the shape leaves behind, and the guard that was there, if it was."""
    guards = []

    def watch(model, optimizer, **parts):
        if not options:
            return contextlib.nullcontext()
        guards.append(stayfinite.watch(model, optimizer, sinks=[], **parts, **options))
        return guards[-1]

    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    try:
        result = shape(watch, folder)
    except stayfinite.TrainingAbortedError:
        result = None
    return result, guards[0] if guards else None


def as_bytes(result):
    leaves, shape = tree_flatten(result)
    plain = [each.numpy().tobytes() if isinstance(each, torch.Tensor) else each for each in leaves]
    return plain, str(shape)


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=NAMES)
def test_the_line_of_the_first_bad_step_is_exact(shape, tmp_path):
    _, guard = run(shape, tmp_path, on_nan="stop")
    (incident,) = guard.incidents
    assert incident.origin is not None
    assert incident.origin.exact, guard._loop_replay.reasons
    assert incident.origin.file.endswith("shapes.py")
    assert incident.origin.line in guilty_lines()
    assert "bit for bit" in incident.diagnosis.evidence[-1], incident.diagnosis.evidence


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=NAMES)
def test_training_goes_on_as_if_nothing_had_been_run_again(shape, tmp_path):
    folders = [tmp_path / "with", tmp_path / "without"]
    for folder in folders:
        folder.mkdir()
    with_it, guard = run(shape, folders[0], on_nan="recover")
    without, other = run(shape, folders[1], on_nan="recover", again="never")
    assert len(guard.incidents) == len(other.incidents) > 0
    assert guard.incidents[0].origin.exact
    assert guard.incidents[0].origin.line in guilty_lines()
    assert as_bytes(with_it) == as_bytes(without)
    written = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert written[0] == written[1]


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=NAMES)
def test_a_healthy_loop_is_the_same_to_the_byte(shape, tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "BAD_ROW", slice(0, 0))
    alone, _ = run(shape, tmp_path)
    watched, guard = run(shape, tmp_path, on_nan="stop")
    assert not guard.incidents
    assert as_bytes(alone) == as_bytes(watched)


def test_there_are_twenty_shapes():
    assert len(set(NAMES)) >= 20
    assert all(inspect.getsource(shape) for shape in shapes.SHAPES)
