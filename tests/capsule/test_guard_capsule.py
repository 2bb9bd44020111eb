"""guard.capsule: what is in it with and without consent, and that it goes bad again elsewhere."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import stayfinite
from stayfinite.capsule import Capsule, read_capsule
from stayfinite.cli import main
from stayfinite.errors import CapsuleError
from stayfinite.records import TensorSummary, to_json

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.noise = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.noise(self.norm(self.inner(x)))
        return hidden.square().sum(1)


class Training:
    """Three good steps, one with a root of zero, and one more good one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.before: list[dict[str, Tensor]] = []

    def step(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        loss = torch.sqrt(self.net(batch[0]) * batch[1]).mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def batches(self) -> list[Batch]:
        masks = [torch.ones(5) for _ in range(5)]
        masks[3][2] = 0
        return [(torch.randn(5, 3), mask) for mask in masks]

    def run(self) -> stayfinite.Guard:
        with stayfinite.watch(self.net, self.optimizer, sinks=[]) as guard:
            for batch in self.batches():
                self.before.append({n: t.clone() for n, t in self.net.state_dict().items()})
                guard.step(self.step, batch)
        return guard


@pytest.fixture(scope="module")
def training() -> tuple[Training, stayfinite.Guard]:
    training = Training()
    return training, training.run()


@pytest.fixture
def made(training: tuple[Training, stayfinite.Guard], tmp_path: Path) -> Callable[..., Capsule]:
    def make(**options: Any) -> Capsule:
        return read_capsule(training[1].capsule(tmp_path / "a.capsule", **options))

    return make


def test_state_is_that_before_the_bad_step(
    training: tuple[Training, stayfinite.Guard], made: Callable[..., Capsule]
) -> None:
    capsule = made()
    assert capsule.state is not None
    assert capsule.state.tensors is not None
    for name, value in training[0].before[3].items():
        assert torch.equal(capsule.state.tensors[f"model.{name}"], value), name
    assert capsule.incident.step == 3
    assert capsule.incident.origin is not None
    assert capsule.incident.origin.node == "SqrtBackward0"


def test_without_consent_nothing_of_the_batch_is_in_it(made: Callable[..., Capsule]) -> None:
    capsule = made()
    assert capsule.batch == ()
    assert any("consent" in note for note in capsule.notes)
    assert capsule.birth is not None
    assert capsule.birth.forward is not None
    given = [*capsule.birth.operation.arguments.values(), *capsule.birth.forward.arguments.values()]
    assert given
    assert all(isinstance(each, TensorSummary) for each in given)


def test_with_consent_batch_and_operation_are_whole(made: Callable[..., Capsule]) -> None:
    capsule = made(with_batch=True)
    inputs, mask = capsule.batch[0]
    assert inputs.shape == (5, 3)
    assert mask.tolist() == [1, 1, 0, 1, 1]
    assert capsule.birth is not None
    assert capsule.birth.forward is not None
    assert capsule.birth.forward.op == "aten.sqrt.default"
    assert capsule.birth.forward.arguments["self"][2] == 0


def test_redaction_is_applied_and_hides_what_was_computed(made: Callable[..., Capsule]) -> None:
    capsule = made(with_batch=True, redact=lambda batch: (torch.zeros_like(batch[0]), batch[1]))
    assert not capsule.batch[0][0].any()
    assert capsule.birth is not None
    assert not capsule.birth.operation.is_whole


def test_redaction_without_batch_is_a_mistake(made: Callable[..., Capsule]) -> None:
    with pytest.raises(CapsuleError, match="redact"):
        made(redact=lambda batch: batch)


def test_large_batch_is_left_out_and_said(
    made: Callable[..., Capsule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stayfinite.capsule.make.LARGEST_BATCH", 8)
    capsule = made(with_batch=True)
    assert capsule.batch == ()
    assert any("80 bytes" in note for note in capsule.notes)


def test_source_can_be_left_out(made: Callable[..., Capsule]) -> None:
    with_source, without = made(), made(with_source=False)
    assert any(b"class Training" in each.text for each in with_source.sources)
    assert without.sources == ()
    assert without.code.digests == with_source.code.digests
    assert "batch[1]" in to_json(with_source.incident)
    assert "batch[1]" not in to_json(without.incident)
    assert with_source.incident.origin is not None
    assert without.incident.origin is not None
    assert without.incident.origin.line == with_source.incident.origin.line


def test_without_a_bad_step_there_is_nothing_to_write(tmp_path: Path) -> None:
    net = nn.Linear(2, 1)
    with (
        stayfinite.watch(net, torch.optim.SGD(net.parameters(), lr=0.1), sinks=[]) as guard,
        pytest.raises(CapsuleError, match="no bad step"),
    ):
        guard.capsule(tmp_path / "a.capsule")
    assert os.listdir(tmp_path) == []


def test_model_from_elsewhere_goes_bad_in_the_same_way(
    made: Callable[..., Capsule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(with_batch=True)
    factory = f"""
import torch
from torch import Tensor, nn

{inspect.getsource(Net)}
def build():
    net = Net()
    return net, lambda batch: torch.sqrt(net(batch[0]) * batch[1]).mean()

def other():
    return torch.nn.Linear(3, 4)
"""
    (tmp_path / "capsule_factory.py").write_text(factory)
    monkeypatch.chdir(tmp_path)
    words = ["replay", "a.capsule", "--json", "--model"]
    done = CliRunner().invoke(main, [*words, "capsule_factory:build"])
    found = {each["what"]: each for each in json.loads(done.output)["compared"]}
    assert found["operation"]["same"]
    assert found["value"]["same"]
    assert found["value"]["here"] == "Inf in 1 of 5"
    assert done.exit_code == 1  # the line is another one: the step is not the same code
    refused = CliRunner().invoke(main, [*words, "capsule_factory:other"])
    assert refused.exit_code == 2
    assert "another one" in refused.output


SCRIPT = """
import sys, torch, stayfinite
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

def step(batch):
    optimizer.zero_grad()
    loss = torch.log(net(batch).square().sum(1) * batch[:, 0].abs()).mean()
    loss.backward()
    optimizer.step()

with stayfinite.watch(net, optimizer, sinks=[]) as guard:
    for number in range(6):
        batch = torch.randn(4, 3)
        if number == 4:
            batch[1, 0] = 0
        guard.step(step, batch)
    guard.capsule(sys.argv[1], with_batch=True)
"""


def test_step_of_a_script_replays_in_another_process_and_folder(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "train.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": forks.SOURCE}
    made = forks.run_text(["train.py", str(here / "a.capsule")], cwd=there, env=env)
    assert made.returncode == 0, made.stderr
    (there / "train.py").unlink()
    refused = CliRunner().invoke(main, ["replay", str(here / "a.capsule")])
    assert refused.exit_code == 2
    assert "nothing was run" in refused.output
    assert "train.py" in refused.output
    done = CliRunner().invoke(main, ["replay", "--trust", "--json", str(here / "a.capsule")])
    assert done.exit_code == 0, done.output
    text = done.output[done.output.index("{") :]
    assert all(each["same"] for each in json.loads(text)["compared"])
    assert os.listdir(here) == ["a.capsule"]
