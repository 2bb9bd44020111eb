"""Tensor.item under watch: the same numbers, nothing left behind, and no device wait."""

from __future__ import annotations

import logging
import math
import struct
from types import FrameType

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stayfinite.detect.hooks import watch_numbers

VALUES = [
    torch.tensor(1.5),
    torch.tensor(-0.0),
    torch.tensor(3),
    torch.tensor(True),
    torch.tensor(2 + 1j),
    torch.tensor(1e-45),
    torch.tensor(math.inf),
    torch.tensor(math.nan, dtype=torch.bfloat16),
    torch.tensor([[7.0]], dtype=torch.float64),
]


def bits(value: object) -> object:
    return struct.pack("d", value) if isinstance(value, float) else value


def test_every_number_is_the_same_to_the_bit() -> None:
    plain = [value.item() for value in VALUES]
    with watch_numbers(lambda *_: None):
        watched = [value.item() for value in VALUES]
        with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
            torch.ones(2).item()
    assert [*map(type, watched)] == [*map(type, plain)]
    assert [*map(bits, watched)] == [*map(bits, plain)]


def test_only_what_is_not_finite_is_told_with_its_line() -> None:
    seen: list[tuple[float, str]] = []

    def told(tensor: Tensor, value: float, frame: FrameType) -> None:
        seen.append((value, frame.f_code.co_name))

    with watch_numbers(told):
        for value in VALUES:
            value.item()
        f"{torch.tensor(math.inf):.2f}"
        str(torch.tensor(-math.inf))
    assert [str(value) for value, _ in seen[:2]] == ["inf", "nan"]
    assert seen[0][1] == test_only_what_is_not_finite_is_told_with_its_line.__name__
    assert seen[2] == (math.inf, "__format__")
    assert seen[3][0] == -math.inf


def test_several_watch_and_leave_in_any_order() -> None:
    told: list[str] = []
    first = watch_numbers(lambda *_: told.append("first"))
    second = watch_numbers(lambda *_: told.append("second"))
    torch.tensor(math.nan).item()
    first.remove()
    torch.tensor(math.nan).item()
    second.remove()
    torch.tensor(math.nan).item()
    assert told == ["first", "second", "second"]
    assert "item" not in Tensor.__dict__


def test_our_failure_is_logged_once_and_reading_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("ours")

    with watch_numbers(fails), caplog.at_level(logging.ERROR):
        assert math.isnan(torch.tensor(math.nan).item())
        assert math.isnan(torch.tensor(math.nan).item())
    assert len(caplog.records) == 1


def test_reading_costs_no_operation_more() -> None:
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    with watch_numbers(lambda *_: None), Count():
        torch.tensor(1.0, device="cpu").item()
        before = Count.calls
        VALUES[0].item()
        VALUES[6].item()
    assert Count.calls - before == 2  # one read each, as without us


@pytest.mark.parametrize("is_watched", [False, True])
def test_compiled_code_with_item_has_the_same_graphs(is_watched: bool) -> None:
    from torch._dynamo.utils import counters

    def graphs() -> dict[str, int]:
        torch._dynamo.reset()
        counters.clear()

        @torch.compile(backend="eager")
        def scaled(x: Tensor) -> Tensor:
            return x * 2 + (x.sum() * 3).item()

        for size in range(2, 8):
            scaled(torch.ones(size))
        return {"frames": counters["frames"]["total"], **counters["stats"]}

    graphs()  # the first time something more is compiled
    plain = graphs()
    watch = watch_numbers(lambda *_: None) if is_watched else None
    assert graphs() == plain
    if watch is not None:
        watch.remove()
