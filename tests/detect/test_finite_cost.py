"""What a scan costs: host reads, temporaries, and what it may write to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stayfinite.detect.finite import all_finite, classify, nonfinite

# Below autograd, bool(flag) and item() are not taken apart any further.
READS = ("_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero")


class Ops(TorchDispatchMode):
    """Counts the reads by the host and lists the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        return sum(name.split(".")[1] in READS for name in self.names)


GRADIENTS = [torch.randn(100), torch.randn(300, 300), torch.randn(9).half(), torch.randn(9, 9).T]


@pytest.mark.parametrize("writable", [True, False])
def test_healthy_tensors_cost_at_most_one_host_read(writable: bool) -> None:
    with Ops() as ops:
        assert all_finite(GRADIENTS, writable=writable)
    assert ops.reads == 1
    with Ops() as ops:
        nonfinite(GRADIENTS, writable=writable)
    assert ops.reads == 1


@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_exact_on_device_never_reads_on_the_host(bad: float) -> None:
    with Ops() as ops:
        flag = nonfinite([*GRADIENTS, torch.tensor(bad)], writable=True, exact_on_device=True)
    assert ops.reads == 0
    assert bool(flag) == math.isnan(bad)


def test_a_false_alarm_of_the_sum_is_confirmed_away() -> None:
    with Ops() as ops:
        assert all_finite([torch.full((10,), 3e38)])
    assert "aten.aminmax.default" in ops.names


def test_a_permuted_or_expanded_tensor_is_read_in_place_and_at_once() -> None:
    image = torch.ones(2, 3, 50, 60).to(memory_format=torch.channels_last).half()
    with Ops() as ops:
        all_finite([image, image[:, :1].expand(-1, 9, -1, -1)])
    assert ops.names.count("aten.aminmax.default") <= 3


def test_only_what_is_ours_to_touch_is_given_to_the_check_that_writes() -> None:
    refused = [torch.ones(2, requires_grad=True), torch.ones(2).half(), torch.ones(2).bfloat16()]
    with Ops() as ops:
        all_finite(refused, writable=True)
        all_finite([torch.ones(2)])
    assert not any("_amp_" in name for name in ops.names)


def _largest_allocation(function: Any) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    return max((event.cpu_memory_usage for event in profile.events()), default=0)


BIG = torch.ones(1 << 20)
LARGE_KINDS = {
    "fp32": BIG,
    "overflowing": torch.full((1 << 20,), 3e38),
    "fp16": BIG.half(),
    "bf16": BIG.bfloat16(),
    "fp8": BIG.to(torch.float8_e5m2),
    "transposed": BIG.view(1 << 5, -1).T,
    "with gaps": BIG.view(-1, 4)[:, :3],
    "fp16 with gaps": BIG.half().view(-1, 4)[:, :3],
    "expanded": BIG[:1024].expand(1024, 1024),
    "negated": BIG._neg_view(),
    "complex": torch.view_as_complex(BIG.view(-1, 2)).conj(),
    "one long row": BIG.view(1, -1)[:, ::2],
}


@pytest.mark.parametrize("kind", LARGE_KINDS)
def test_no_temporary_is_as_large_as_the_input(kind: str) -> None:
    tensor = LARGE_KINDS[kind]
    assert _largest_allocation(tensor.contiguous().clone) > 1 << 18
    assert _largest_allocation(lambda: nonfinite([tensor])) <= 1 << 18
    assert _largest_allocation(lambda: nonfinite([tensor], exact_on_device=True)) <= 1 << 18
    assert _largest_allocation(lambda: all_finite([tensor], writable=True)) <= 1 << 18
    assert _largest_allocation(lambda: classify(tensor)) <= 1 << 18
