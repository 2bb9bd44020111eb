"""stayfinite.watch around loops that end themselves because of a bad loss."""

from __future__ import annotations

import sys
import textwrap

import forks
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stayfinite

SCRIPT = """
    import sys, torch
    import stayfinite

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(6, 4, 3)
    x[4, 1] = 0.0
    stayfinite.watch(model, optimizer)
    for batch in x:
        loss = model(batch / batch.norm(dim=1, keepdim=True)).square().mean()
        if not torch.isfinite(loss):
            {ending}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "ending", ["raise RuntimeError('diverged')", "sys.exit(f'loss is {loss.item()}')"]
)
def test_a_script_that_ends_itself_is_told_the_line(ending, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(ending=ending)))
    done = forks.run_text([str(script)], cwd=tmp_path)
    assert done.returncode == 1
    assert "train.py:11" in done.stderr, done.stderr
    assert done.stderr.count("error[") == 1


def healthy_then_bad(x):
    for number in range(6):
        yield x * 0.0 if number == 4 else x


@pytest.mark.parametrize("on_nan", ["stop", "recover"])
def test_an_error_inside_with_is_looked_at(on_nan):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hook = sys.excepthook
    with (  # noqa: PT012
        pytest.raises(FloatingPointError),
        stayfinite.watch(model, optimizer, on_nan=on_nan, sinks=[]) as guard,
    ):
        for x in healthy_then_bad(torch.ones(2, 3)):
            loss = model(x / x.norm()).square().mean()
            if not torch.isfinite(loss):
                raise FloatingPointError(f"step {guard.steps}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (incident,) = guard.incidents
    assert incident.origin.exact
    assert "x / x.norm()" in incident.origin.code
    assert sys.excepthook is hook


def test_a_loss_that_the_script_skips_is_told_at_the_next_batch():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.ones(6, 3)
    rows[3] = 0.0
    loader = torch.utils.data.DataLoader(rows, batch_size=1)
    with stayfinite.watch(model, optimizer, on_nan="stop", sinks=[]) as guard:
        for x in loader:
            loss = model(x / x.norm()).square().mean()
            if loss.item() != loss.item():
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (incident,) = guard.incidents
    assert incident.origin.exact
    assert incident.outcome.strategy == "script"


def test_our_own_stop_and_ctrl_c_are_no_incidents():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        stayfinite.watch(model, optimizer, sinks=[]) as guard,
    ):
        loss = torch.tensor(float("nan"))  # noqa: F841
        raise KeyboardInterrupt
    assert not guard.incidents


@pytest.mark.parametrize("on_nan", ["stop", "recover"])
def test_a_learning_rate_that_is_nan_has_the_line_of_its_update(on_nan):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = stayfinite.watch(model, optimizer, on_nan=on_nan, sinks=[])
    try:
        for number in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.param_groups[0]["lr"] = float("nan") if number == 2 else 0.01
            optimizer.step()
    except stayfinite.TrainingAbortedError:
        assert on_nan == "stop"
    finally:
        guard.close()
    origin = guard.incidents[0].origin
    assert origin is not None
    assert origin.code.strip() == "optimizer.step()"


def test_a_bad_loss_is_told_once_where_the_loader_reads_ahead():
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(7, 2))
    loader = accelerate.Accelerator(cpu=True).prepare(DataLoader(data, batch_size=2))
    losses = []
    with stayfinite.watch(net, optimizer, sinks=[]) as guard:
        for _ in range(3):
            for (x,) in loader:
                optimizer.zero_grad()
                loss = (net(x) / (len(x) - 1)).mean() * 0.0  # of one sample it is NaN
                (loss / 1).backward()
                optimizer.step()
                losses.append(loss.item())
    assert [each.outcome.strategy for each in guard.incidents] == ["skip"] * 3
