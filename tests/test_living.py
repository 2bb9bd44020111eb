"""Dotted names, from the topmost owner."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from scenes import origin
from torch import Tensor, nn

from stayfinite.living import Names, one_look, running_statistics


class Bad(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 1.0


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList([Layer(nn.Identity()), Layer(Bad())])
        self.heads = nn.ModuleDict({"main": nn.Identity()})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder.layers:
            x = layer(x)
        return self.heads["main"](x)


def named(step: Any) -> tuple[str | None, str | None]:
    found = origin(step)
    return found.root, found.module


def test_nested_module_has_its_dotted_name() -> None:
    root = Root()
    assert named(lambda: root(torch.zeros(2))) == ("Root", "encoder.layers.1.inner")


def test_root_itself_has_an_empty_name() -> None:
    root = Bad()
    assert named(lambda: root(torch.zeros(2))) == ("Bad", "")


def test_operation_outside_any_module_has_no_name() -> None:
    assert named(lambda: torch.log(torch.zeros(2))) == (None, None)


def test_each_of_two_roots_has_its_own_names() -> None:
    one, two = nn.Sequential(nn.Identity()), Layer(Bad())
    assert named(lambda: two(one(torch.zeros(2)))) == ("Layer", "inner")


class Owner(nn.Module):
    """Its forward is never run; its losses are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Bad()])

    def losses(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def test_module_called_past_its_root_is_named_from_the_root() -> None:
    owner = Owner()
    assert named(lambda: owner.losses(torch.zeros(2))) == ("Owner", "blocks.1")


def test_module_in_a_plain_list_is_its_own_root() -> None:
    modules = [Bad()]
    assert named(lambda: modules[0](torch.zeros(2))) == ("Bad", "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["dp", "compile"]
)
def test_prefix_of_a_wrapper_is_dropped(wrap: Any) -> None:
    wrapped = wrap(Root())
    with torch.compiler.set_stance("force_eager"):
        assert named(lambda: wrapped(torch.zeros(2))) == ("Root", "encoder.layers.1.inner")
    weight = nn.Linear(2, 1)
    kept = wrap(weight)
    assert Names().tensor(weight.weight) == "weight"
    del kept


def test_shared_module_is_named_by_the_owner_that_called_it() -> None:
    shared = Bad()
    first, second = Layer(shared), Layer(nn.Sequential(shared))
    assert named(lambda: first(torch.zeros(2))) == ("Layer", "inner")
    assert named(lambda: second(torch.zeros(2))) == ("Layer", "inner.0")


def test_module_that_raised_is_left() -> None:
    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("of the user")

    raising, bad = Raising(), Bad()

    def step() -> Tensor:
        with pytest.raises(KeyError):
            raising(torch.zeros(2))
        return bad(torch.zeros(2))

    assert named(step) == ("Bad", "")
    assert named(lambda: torch.log(torch.zeros(2))) == (None, None)


def test_parameters_and_buffers_have_names_and_other_tensors_have_none() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    names = Names()
    assert names.tensor(net[0].bias) == "0.bias"
    assert names.tensor(net[1].running_mean) == "1.running_mean"
    assert names.tensor(torch.ones(2)) is None


def test_tied_weight_has_one_of_its_names() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert Names().tensor(net[0].weight) in ("0.weight", "1.weight")


def test_module_that_owns_its_own_owner_does_not_hang() -> None:
    one, two = nn.Module(), nn.Module()
    one.two = two
    object.__setattr__(two, "back", one)
    two._modules["back"] = one
    root, name = Names().module(two)
    assert (root, name) == ("Module", "two")
    two._modules.clear()


def test_running_statistics_are_those_of_living_modules_and_no_other_buffers() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    net.register_buffer("mask", torch.full((2,), -torch.inf))
    found = {id(tensor) for tensor in running_statistics()}
    assert {id(net[1].running_mean), id(net[1].running_var)} <= found
    assert id(net.mask) not in found


def test_living_modules_are_looked_for_once_in_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    walks = []
    everything = gc.get_objects

    def counted() -> list[Any]:
        walks.append(1)
        return everything()

    monkeypatch.setattr(gc, "get_objects", counted)
    root = Root()
    with one_look():
        Names()
        with one_look():
            running_statistics()
        assert Names().module(root.heads["main"]) == ("Root", "heads.main")
    assert len(walks) == 1
    late = Root()
    assert Names().module(late.heads["main"]) == ("Root", "heads.main")
    assert len(walks) == 2
