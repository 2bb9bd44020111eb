"""A loss that is a sum: which of its terms is bad."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scenes import origin
from torch import Tensor

import stayfinite
from stayfinite.explain.clue import Context
from stayfinite.explain.rules import diagnose
from stayfinite.records import Origin

X = torch.ones(3, requires_grad=True)


def good(scale: float = 1.0) -> Tensor:
    return (X * scale).mean()


def bad() -> Tensor:
    return torch.log(X - 2.0).mean()


def names() -> Tensor:
    box, dfl = good(), bad()
    return box + 0.5 * dfl


def three() -> Tensor:
    box, cls, dfl = good(), good(2.0), bad()
    weight = 0.3
    return 7.5 * box - weight * cls + dfl / 4


def first_of_three() -> Tensor:
    box, cls, dfl = bad(), good(2.0), good()
    return 7.5 * box + 0.5 * cls + 1.5 * dfl


def calls() -> Tensor:
    return good(1.0) + bad() + good(3.0)


def items() -> Tensor:
    losses = {"box": good(), "dfl": bad()}
    return losses["box"] + losses["dfl"]


def list_sum() -> Tensor:
    parts = [good(), bad(), good(2.0)]
    return sum(parts)


def dict_sum() -> Tensor:
    losses = {"box": good(), "dfl": bad(), "cls": good(2.0)}
    return sum(losses.values())


def weighted_sum() -> Tensor:
    losses, weights = {"box": good(), "dfl": bad()}, {"box": 1.0, "dfl": 0.1}
    return sum(weights[name] * value for name, value in losses.items())


def stacked() -> Tensor:
    box, dfl = good(), bad()
    return torch.stack([box, dfl]).sum()


def stacked_dict() -> Tensor:
    losses = {"box": good(), "dfl": bad()}
    return torch.stack(list(losses.values())).mean()


def loop() -> Tensor:
    losses = {"box": good(), "dfl": bad(), "cls": good(2.0)}
    total = torch.zeros(())
    for _, value in losses.items():
        total = total + value
    return total


def loop_of_calls() -> Tensor:
    makers = {"box": good, "dfl": bad}
    total = torch.zeros(())
    for _name, make in makers.items():
        total += make()
    return total


def per_sample() -> Tensor:
    recon, kl = X * 2.0, torch.log(X - 2.0)
    return (recon + 0.1 * kl).mean()


@pytest.mark.parametrize(
    ("step", "terms", "guilty"),
    [
        (names, ["box", "dfl"], ["dfl"]),
        (three, ["box", "cls", "dfl"], ["dfl"]),
        (first_of_three, ["box", "cls", "dfl"], ["box"]),
        (calls, ["good(1.0)", "bad()", "good(3.0)"], ["bad()"]),
        (items, ["box", "dfl"], ["dfl"]),
        (list_sum, ["parts[0]", "parts[1]", "parts[2]"], ["parts[1]"]),
        (dict_sum, ["box", "dfl", "cls"], ["dfl"]),
        (weighted_sum, ["box", "dfl"], ["dfl"]),
        (stacked, ["box", "dfl"], ["dfl"]),
        (stacked_dict, ["box", "dfl"], ["dfl"]),
        (loop, ["box", "dfl", "cls"], ["dfl"]),
        (loop_of_calls, ["dfl"], ["dfl"]),
        (per_sample, ["recon", "kl"], ["kl"]),
    ],
)
def test_the_bad_term_is_named(
    step: Callable[[], Tensor], terms: list[str], guilty: list[str]
) -> None:
    found = origin(step)
    assert found is not None
    (facts,) = found.facts["sums"]
    assert [name for name, _ in facts["terms"]] == terms
    assert [name for name, flag in facts["terms"] if flag] == guilty
    said = diagnose(found, Context()).evidence[-1]
    assert said.startswith("of the terms of the loss")
    assert f"{guilty[0]} is NaN" in said


def test_only_is_said_when_all_terms_are_known() -> None:
    found = origin(names)
    assert found is not None
    line = found.facts["sums"][0]["where"][1]
    said = diagnose(found, Context()).evidence[-1]
    assert said == f"of the terms of the loss (box, dfl) only dfl is NaN (line {line})"


def test_no_term_is_named_when_all_are_bad() -> None:
    def step() -> Tensor:
        one, two = bad(), bad()
        return one + two

    found = origin(step)
    assert found is not None
    assert "sums" not in found.facts


def test_a_sum_of_activations_is_no_sum_of_the_loss() -> None:
    def step() -> Tensor:
        residual, update = X * 2.0, torch.log(X - 2.0)
        return torch.tanh(residual + update).mean()

    found = origin(step)
    assert found is not None
    assert "sums" not in found.facts


def test_a_constant_is_no_term() -> None:
    def step() -> Tensor:
        box, dfl = good(), bad()
        return 1.0 + box + dfl

    found = origin(step)
    assert found is not None
    assert [name for name, _ in found.facts["sums"][0]["terms"]] == ["box", "dfl"]


def backward_origin(loss: Callable[[], Tensor]) -> Origin:
    with stayfinite.trace(raise_on_nan=False) as block:
        loss().backward()
    X.grad = None
    found = block.incidents[0].origin
    assert found is not None
    return found


def bad_gradient() -> Tensor:
    return torch.sqrt(X - 1.0).sum()


def two_terms() -> Tensor:
    box, dfl = good(), bad_gradient()
    return 2.0 * box + 0.1 * dfl


def three_terms() -> Tensor:
    return good() + bad_gradient() / 3 + good(2.0)


def added_list() -> Tensor:
    return sum([good(), bad_gradient()])


def stacked_terms() -> Tensor:
    box, dfl = good(), bad_gradient()
    return torch.stack([box, dfl]).mean()


def inner_sum() -> Tensor:
    def inner() -> Tensor:
        one, two = good(), bad_gradient()
        return one + two

    return inner() + good(3.0)


@pytest.mark.parametrize(
    ("loss", "terms", "guilty"),
    [
        (two_terms, ["box", "dfl"], "dfl"),
        (three_terms, ["good()", "bad_gradient()", "good(2.0)"], "bad_gradient()"),
        (added_list, ["good()", "bad_gradient()"], "bad_gradient()"),
        (stacked_terms, ["box", "dfl"], "dfl"),
        (inner_sum, ["inner()", "good(3.0)"], "inner()"),
    ],
)
def test_the_term_behind_a_bad_gradient_is_named(
    loss: Callable[[], Tensor], terms: list[str], guilty: str
) -> None:
    found = backward_origin(loss)
    assert [name for name, _ in found.facts["term"]["terms"]] == terms
    said = diagnose(found, Context()).evidence[-1]
    assert f"only {guilty} leads to this operation" in said


def test_an_operation_that_all_terms_share_names_none() -> None:
    def loss() -> Tensor:
        shared = torch.sqrt(X - 1.0)
        box, dfl = shared.sum(), shared.mean()
        return box + dfl

    found = backward_origin(loss)
    assert [flag for _, flag in found.facts["term"]["terms"]] == [True, True]
    assert not any("term" in said for said in diagnose(found, Context()).evidence)
