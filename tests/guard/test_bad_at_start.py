"""State that was bad before training began is called what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stayfinite
from stayfinite.guard.evidence import Evidence


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, index: Tensor) -> Tensor:
        out: Tensor = self.head(self.rows(index)) * self.scale[index, None]
        return out


def trained(net: nn.Module, steps: int = 6) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with stayfinite.watch(net, optimizer, on_nan="warn", sinks=[], prove_seconds=0) as guard:
        for step in range(steps):
            optimizer.zero_grad()
            loss = net(torch.tensor([step, step + 1])).pow(2).mean()
            loss.backward()
            optimizer.step()
            if guard.incidents:
                break
    return guard.incidents[0]


def loaded(path: Path, key: str, index: int) -> Table:
    state = Table().state_dict()
    state[key][index] = float("nan")
    torch.save(state, path)
    net = Table()
    net.load_state_dict(torch.load(path, weights_only=True))
    return net


@pytest.mark.parametrize(
    ("key", "index", "said"),
    [
        ("head.weight", 0, "Parameter head.weight was not finite before the first update"),
        ("rows.weight", 5, "Parameter rows.weight was not finite before the first update"),
        ("scale", 5, "Buffer scale of Table was not finite before the first update"),
    ],
)
def test_a_checkpoint_that_was_loaded_before_the_watch_is_named(
    tmp_path: Path, key: str, index: int, said: str
) -> None:
    torch.manual_seed(0)
    found = trained(loaded(tmp_path / "last.pt", key, index))
    assert found.diagnosis is not None
    assert found.diagnosis.cause == "checkpoint_corrupt", found.diagnosis
    assert said in found.diagnosis.why
    assert "test_bad_at_start.py:" in found.diagnosis.why


def test_the_first_look_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a value was read")

    evidence = Evidence()
    with monkeypatch.context() as patch:
        for name in ("item", "__bool__", "__float__", "tolist"):
            patch.setattr(Tensor, name, refuse)
        evidence.note_start(Table())
    assert len(evidence._ranges_at_start) == 4
