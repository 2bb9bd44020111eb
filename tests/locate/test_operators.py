"""What is read off an operator's schema, and off one call of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stayfinite.locate.operators import (
    Call,
    holds,
    is_bad,
    kind_of_event,
    learn,
    named_tensors,
    nonfinite_constants,
    read_for,
    scalars,
    tensors_in,
    wait_for,
    written_by,
)
from stayfinite.records import NaNType

aten = torch.ops.aten
NAN, INF, NEG, NONE = NaNType.NAN, NaNType.POS_INF, NaNType.NEG_INF, NaNType.NONE


def call(func: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(learn(func), args, kwargs)


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (aten.log.default, {"base": "log", "written": (), "is_view": False, "allocates": False}),
        (aten.add_.Tensor, {"base": "add_", "written": (0,), "overwrites": False, "fills": True}),
        (aten.copy_.default, {"written": (0,), "overwrites": True}),
        (aten.add.out, {"written_names": ("out",), "overwrites": True}),
        (aten.empty.memory_format, {"allocates": True}),
        (aten.new_empty_strided.default, {"allocates": True}),
        (aten.view.default, {"is_view": True}),
        (aten.t.default, {"is_view": True}),
        (aten.detach.default, {"is_view": True}),
        (aten.split.Tensor, {"is_view": True}),
        (aten.clone.default, {"is_view": False}),
        (aten._foreach_add_.List, {"written": (0,), "overwrites": False}),
        (aten.masked_fill.Scalar, {"fills": True}),
        (aten.zero_.default, {"written": (0,), "overwrites": True}),
    ],
    ids=str,
)
def test_operator_is_learned_from_its_schema(func: Any, expected: dict[str, Any]) -> None:
    info = learn(func)
    assert {name: getattr(info, name) for name in expected} == expected


def test_every_operator_of_aten_can_be_learned() -> None:
    learned = 0
    for name in dir(aten):
        packet = getattr(aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for overload in packet.overloads():
                assert learn(getattr(packet, overload)).base == packet.__name__.split("::")[-1]
                learned += 1
    assert learned > 1000


def test_collective_is_recognised() -> None:
    assert learn(torch.ops.c10d.allreduce_.default).is_collective
    assert not learn(aten.add.Tensor).is_collective


def test_arguments_go_by_the_names_of_the_schema() -> None:
    one, two = torch.ones(1), torch.ones(2)
    given = named_tensors(call(aten.cat.default, [one, two], 0))
    assert [name for name, _ in given] == ["tensors[0]", "tensors[1]"]
    assert scalars(call(aten.add.Tensor, one, two, alpha=3)) == {"alpha": 3}
    assert scalars(call(aten.sum.dim_IntList, one, [0], True)) == {"dim": [0], "keepdim": True}


def test_long_lists_are_no_plain_scalars() -> None:
    assert scalars(call(aten.view.default, torch.ones(1), [1] * 9)) == {}


def test_constants_that_are_not_finite_are_listed() -> None:
    given = call(aten.masked_fill.Scalar, torch.ones(1), torch.ones(1), -math.inf)
    assert nonfinite_constants(given) == [-math.inf]
    assert nonfinite_constants(call(aten.add.Tensor, torch.ones(1), 1.0)) == []


def test_tensors_are_found_in_nested_lists() -> None:
    one = torch.ones(1)
    assert tensors_in([one, (one, None, [one, 3])]) == [one, one, one]
    assert tensors_in(None) == tensors_in("text") == []


BAD = [
    (torch.tensor([1.0, math.nan]), True),
    (torch.tensor([1.0, math.inf]), True),
    (torch.tensor([math.inf, -math.inf]), True),
    (torch.full((4,), 3e38), False),  # the sum overflows
    (torch.full((4,), 60000.0, dtype=torch.float16), False),
    (torch.tensor([1.0, math.inf], dtype=torch.float16), True),
    (torch.tensor([1e308, 1e308], dtype=torch.float64), False),
    (torch.tensor([3e38, 3e38], dtype=torch.bfloat16), False),
    (torch.ones(0), False),
    (torch.tensor([1, 2]), False),
    (torch.tensor([True]), False),
    (torch.tensor([complex(0, math.nan)]), True),
    (torch.ones(2, device="meta"), False),
    (torch.tensor([[0.0, math.nan]]).to_sparse(), True),
    (nn.Parameter(torch.tensor([math.nan])), True),
    (torch.tensor([1.0, math.nan]).to(torch.float8_e5m2), True),
]


@pytest.mark.parametrize(("tensor", "bad"), BAD)
def test_bad_means_any_element_that_is_not_finite(tensor: Tensor, bad: bool) -> None:
    assert is_bad(tensor) is bad


@pytest.mark.parametrize(
    ("func", "scalars", "inputs", "output", "kind"),
    [
        (aten.log.default, (), set(), NEG, "birth"),
        (aten.sub.Tensor, (), {INF}, NAN, "conversion"),
        (aten.mul.Tensor, (), {INF}, INF, "spread"),
        (aten.mul.Tensor, (), {NAN}, NAN, "spread"),
        (aten.mul.Tensor, (), {NAN, INF}, NAN, "spread"),
        (aten.sum.default, (), {NEG}, INF, "spread"),
        (aten.masked_fill.Scalar, (-math.inf,), set(), NEG, "constant"),
        (aten.full.default, (math.nan,), set(), NAN, "constant"),
        (aten.full.default, (math.inf,), set(), INF, "constant"),
        (aten.add.Tensor, (-math.inf,), set(), NEG, "constant"),
        (aten.mul.Tensor, (-math.inf,), set(), NEG, "constant"),
        (aten.mul.Tensor, (-math.inf,), set(), NAN, "birth"),
        (aten.div.Tensor, (math.inf,), set(), NAN, "birth"),
        (aten.log.default, (math.inf,), set(), INF, "birth"),
    ],
)
def test_kind_of_event(
    func: Any, scalars: Any, inputs: set[NaNType], output: NaNType, kind: str
) -> None:
    given = call(func, torch.ones(1), *scalars)
    assert kind_of_event(given, output, inputs, None) == kind


def test_written_arguments_are_those_the_schema_marks() -> None:
    one, two = torch.ones(1), torch.ones(1)
    assert written_by(call(aten.add.Tensor, one, two)) == ()
    assert written_by(call(aten.add_.Tensor, one, two))[0] is one
    assert written_by(call(aten.add.out, one, two, out=two))[0] is two
    assert len(written_by(call(aten._foreach_add_.List, [one, two], [one, two]))) == 2


def test_overwritten_argument_is_not_read() -> None:
    one, two = torch.ones(1), torch.ones(1)
    copied = call(aten.copy_.default, one, two)
    assert [name for name, _ in read_for(copied, one, written_by(copied))] == ["src"]
    added = call(aten.add_.Tensor, one, two)
    assert [name for name, _ in read_for(added, one, written_by(added))] == ["self", "other"]


def test_only_the_members_beside_the_bad_one_are_read_from_a_foreach_list() -> None:
    left, right = [torch.ones(1) for _ in range(3)], [torch.ones(1) for _ in range(3)]
    given = call(aten._foreach_add_.List, left, right)
    names = [name for name, _ in read_for(given, left[1], written_by(given))]
    assert names == ["self[1]", "other[1]"]


def test_holding_is_by_identity() -> None:
    one, same = torch.ones(1), torch.ones(1)
    assert holds([one], one)
    assert not holds([one], same)


def test_collective_is_waited_for() -> None:
    class Work:
        done = False

        def wait(self) -> None:
            self.done = True

    work = Work()
    wait_for(([torch.ones(1)], work))
    assert work.done
    wait_for(torch.ones(1))
    wait_for(())
