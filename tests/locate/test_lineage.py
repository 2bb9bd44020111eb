"""A bad value is followed home, however it travelled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scenes import Net, guilty, kinds, origin
from torch import Tensor, nn

ZERO = torch.zeros(3)
BORN = "torch.log(ZERO)"


def through_views() -> Tensor:
    bad = torch.log(ZERO)
    return bad.view(1, 3).t()[1:].expand(2, 1).contiguous()


def through_an_in_place_add() -> Tensor:
    total = torch.zeros(3)
    total += torch.log(ZERO)
    total.mul_(2.0)
    return total.sum()


def through_a_slice() -> Tensor:
    table = torch.zeros(4, 3)
    table[2].copy_(torch.log(ZERO))
    return table.sum()


def through_item_assignment() -> Tensor:
    table = torch.zeros(4, 3)
    table[1] = torch.log(ZERO)
    return table.mean()


def through_a_table_with_another_bad_row() -> Tensor:
    table = torch.zeros(4, 3)
    table[1] = torch.log(ZERO)
    table[3] = torch.sqrt(ZERO - 1)
    return table.sum()


def through_index_put() -> Tensor:
    table = torch.zeros(5)
    table[torch.tensor([0, 2, 4])] = torch.log(ZERO)
    return table.sum()


def through_index_add() -> Tensor:
    table = torch.zeros(5)
    table.index_add_(0, torch.tensor([0, 1, 2]), torch.log(ZERO))
    return table.sum()


def through_out() -> Tensor:
    result = torch.ones(3)
    bad = torch.log(ZERO)
    torch.add(bad, 1.0, out=result)
    return result


def through_a_view_written_later() -> Tensor:
    whole = torch.zeros(6)
    part = whole[:3]
    part.add_(torch.log(ZERO))
    return whole


def through_cat_and_split() -> Tensor:
    both = torch.cat([torch.ones(2), torch.log(ZERO)])
    return torch.split(both, 2)[1]


def through_a_cast() -> Tensor:
    return torch.log(ZERO).double().to(torch.float16).float()


def through_foreach() -> list[Tensor]:
    sums = [torch.ones(3), torch.ones(3)]
    torch._foreach_add_(sums, [torch.ones(3), torch.log(ZERO)])
    return sums


def through_detach_and_data() -> Tensor:
    held = torch.ones(3)
    held.data = torch.log(ZERO).detach()
    return held * 1.0


WAYS = [value for name, value in list(globals().items()) if name.startswith("through_")]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_value_is_followed_home(way: Any) -> None:
    assert guilty(way) == BORN
    assert kinds(way)[0] == "birth"


def test_out_variant_that_overwrites_a_bad_value_ends_its_story() -> None:
    def step() -> Tensor:
        result = torch.log(ZERO)
        torch.add(ZERO, 1.0, out=result)
        return result

    assert origin(step) is None


def test_overwritten_memory_gets_a_new_story() -> None:
    def step() -> Tensor:
        memory = torch.log(ZERO)
        memory.zero_()
        memory.copy_(torch.sqrt(ZERO - 1))
        return memory

    assert guilty(step) == "torch.sqrt(ZERO - 1)"


def test_part_of_overwritten_memory_gets_a_new_story() -> None:
    def step() -> Tensor:
        memory = torch.log(ZERO)
        memory.zero_()
        memory[1] = torch.sqrt(ZERO - 1)[0]
        return memory

    assert guilty(step) == "torch.sqrt(ZERO - 1)"


def test_memory_that_is_used_again_is_not_blamed() -> None:
    def step() -> Tensor:
        for _ in range(50):
            torch.log(ZERO)  # freed at once
        return torch.ones(3) * 2

    assert origin(step) is None


def test_first_birth_is_named_when_there_are_two() -> None:
    def step() -> Tensor:
        one = torch.log(ZERO)
        two = torch.sqrt(ZERO - 1)
        return two + one

    assert guilty(step) == BORN


def test_birth_that_does_not_reach_the_value_is_not_named() -> None:
    def step() -> Tensor:
        unused = torch.log(ZERO)
        assert unused.numel() == 3
        return torch.sqrt(ZERO - 1)

    assert guilty(step) == "torch.sqrt(ZERO - 1)"


def test_inf_that_becomes_nan_is_named_by_the_inf() -> None:
    def step() -> Tensor:
        large = torch.exp(ZERO + 100)
        return large - large

    found = origin(step)
    assert found.facts["expression"] == "torch.exp(ZERO + 100)"
    assert [hop.kind for hop in found.lineage] == ["birth", "conversion"]
    assert found.facts["became_nan"]["op"] == "aten.sub.Tensor"


def test_value_is_followed_across_steps_and_modules() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> Tensor:
        for i in range(4):
            optimizer.zero_grad()
            loss = net(torch.ones(2, 3)).mean()
            if i == 1:
                loss = loss * torch.log(torch.zeros(()))
            loss.backward()
            optimizer.step()
        return loss

    found = origin(step)
    assert found.facts["expression"] == "torch.log(torch.zeros(()))"
    assert found.lineage[-1].module in ("second", None)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "rmsprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_bad_gradient_is_followed_through_the_optimizer(make: Any) -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = make(params)

    def step() -> Tensor:
        loss = params[0].sum() + (params[1].prod() * torch.log(ZERO)).sum()
        loss.backward()
        optimizer.step()
        return params[1] * 1.0

    assert guilty(step) == BORN


@pytest.mark.parametrize("foreach", [True, False])
def test_healthy_neighbour_in_a_foreach_list_is_not_mixed_up(foreach: bool) -> None:
    good, bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([good, bad], lr=0.1, foreach=foreach)

    def step() -> list[Tensor]:
        (good.sum() + (bad * torch.log(ZERO)).sum()).backward()
        optimizer.step()
        return [good]

    assert origin(step) is None


def test_value_is_found_in_accumulated_gradients() -> None:
    net = Net()

    def step() -> list[Tensor]:
        for i in range(3):
            weight = torch.log(torch.zeros(())) if i == 1 else 1.0
            (net(torch.ones(2, 3)).sum() * weight).backward()
        return [p.grad for p in net.parameters()]

    assert guilty(step) == "torch.log(torch.zeros(()))"


def test_sum_of_finite_gradients_that_overflows_is_born_while_accumulating() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))

    def step() -> Tensor:
        for _ in range(2):
            (weight * 40000.0).sum().backward()
        return weight.grad

    found = origin(step)
    assert "AccumulateGrad" in found.node
    assert found.phase == "backward"


def test_update_that_divides_by_zero_has_the_optimizer_as_its_phase() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], eps=0.0)

    def step() -> Tensor:
        (weight * 0.0).sum().backward()
        optimizer.step()
        return weight

    found = origin(step)
    assert found.phase == "optimizer"
    assert found.facts["expression"] == "optimizer.step()"


def test_rate_that_is_nan_has_the_optimizer_as_its_phase() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> Tensor:
        weight.sum().backward()
        optimizer.param_groups[0]["lr"] = math.nan
        optimizer.step()
        return weight

    assert origin(step).phase == "optimizer"


def test_hand_written_update_is_the_users_own_line() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step() -> Tensor:
        weight.sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad / ZERO)
        return weight

    found = origin(step)
    assert found.phase == "forward"
    assert found.facts["expression"] == "weight.grad / ZERO"


def test_long_way_is_shortened_with_both_ends() -> None:
    def step() -> Tensor:
        value = torch.exp(ZERO + 100)
        for _ in range(60):
            value = value + 1.0
        return value - value

    hops = origin(step).lineage
    assert len(hops) <= 30
    assert hops[0].kind == "birth"
    assert hops[-1].kind == "conversion"


def test_exact_is_said_of_a_traced_origin_with_its_inputs() -> None:
    found = origin(lambda: torch.log(ZERO))
    assert found.exact
    assert [(item.name, item.zero_count) for item in found.inputs] == [("self", 3)]
    assert found.outputs[0].neg_inf_count == 3
