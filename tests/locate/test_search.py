"""find_source: found, and everything put back; and the guess from a graph."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scenes import Net, Unstable
from torch import Tensor, nn

from stayfinite.errors import InputError
from stayfinite.guard.evidence import origin_from_graph
from stayfinite.locate.search import find_source

INPUT = torch.ones(4, 3)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_source_is_found_and_the_model_is_as_before(value: float, untouched: Any) -> None:
    model = Unstable()
    model(INPUT).sum().backward()  # gradients that must be kept
    is_same = untouched(model)
    found = find_source(model, torch.full((4, 3), value))
    assert is_same()
    assert (found is None) == (value == 1.0)
    if found:
        assert found.facts["expression"] == "torch.log(x)"
        assert (found.root, found.module) == ("Unstable", "")


def test_model_is_as_before_when_it_raises(untouched: Any) -> None:
    model = Unstable()
    is_same = untouched(model)
    with pytest.raises(RuntimeError):
        find_source(model, torch.ones(4, 7))
    assert is_same()


def test_gradient_that_is_bad_is_found_too() -> None:
    net = Net()
    found = find_source(net, INPUT, loss_fn=lambda output: torch.sqrt(output * 0.0))
    assert (found.phase, found.node) == ("backward", "SqrtBackward0")


def test_source_is_found_inside_no_grad() -> None:
    with torch.no_grad():
        found = find_source(Net(), INPUT, loss_fn=lambda output: torch.sqrt(output * 0.0).sum())
    assert found.phase == "backward"


class Keywords(nn.Module):
    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> dict[str, Tensor]:
        return {"logits": x * scale, "loss": (x / scale).sum()}


@pytest.mark.parametrize(
    ("inputs", "is_bad"),
    [
        (INPUT, False),
        ((INPUT, torch.zeros(())), True),
        ([INPUT, 2.0], False),
        ({"x": INPUT, "scale": torch.zeros(())}, True),
        ({"x": INPUT}, False),
    ],
)
def test_inputs_are_passed_as_people_pass_them(inputs: Any, is_bad: bool) -> None:
    assert (find_source(Keywords(), inputs) is not None) == is_bad


def test_targets_go_to_the_loss() -> None:
    found = find_source(
        Net(), INPUT, targets=torch.full((4, 1), math.nan), loss_fn=nn.functional.mse_loss
    )
    assert found.phase == "data"


def test_infinite_output_that_is_masked_away_is_no_source() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            masked = x.masked_fill(torch.tensor([False, False, True]), -math.inf)
            return torch.softmax(masked, -1)

    assert find_source(Attention(), INPUT) is None


@pytest.mark.parametrize(
    ("model", "loss_fn", "words"),
    [
        ("a string", None, "model is a str"),
        (Net(), lambda output: 3.0, "loss_fn returned a float"),
        (nn.Embedding(3, 2).to(torch.float32), lambda output: None, "loss_fn returned a NoneType"),
    ],
)
def test_wrong_arguments_are_refused_by_name(model: Any, loss_fn: Any, words: str) -> None:
    inputs = torch.tensor([1]) if isinstance(model, nn.Embedding) else INPUT
    with pytest.raises(InputError, match=words):
        find_source(model, inputs, loss_fn=loss_fn)


def test_model_without_a_float_output_asks_for_a_loss() -> None:
    class Classes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(-1)

    with pytest.raises(InputError, match="pass loss_fn"):
        find_source(Classes(), INPUT)


def test_graph_names_the_earliest_node_that_kept_a_bad_value() -> None:
    net = Net()
    loss = (net(INPUT) * math.inf).square().sum()
    found = origin_from_graph([loss])
    assert (found.phase, found.node, found.exact) == ("forward", "PowBackward0", False)


def test_graph_names_the_module_of_a_parameter_beside_it() -> None:
    net = nn.Sequential(nn.Identity(), nn.Linear(3, 1))
    loss = net(INPUT * math.nan).sum()
    assert origin_from_graph([loss]).module == "1"


def test_graph_without_bad_values_names_nothing() -> None:
    assert origin_from_graph([Net()(INPUT).sum()]) is None
    assert origin_from_graph([torch.tensor(math.nan)]) is None
    freed = Net()(INPUT).square().sum()
    freed.backward()
    assert origin_from_graph([freed]) is None
