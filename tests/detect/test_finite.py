"""The scan misses nothing, raises no false alarm, and leaves everything as it was."""

from __future__ import annotations

import math
import mmap
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensor_kinds import BAD, FP8, NAN_ONLY, WIDE, kinds_for, make, quiet
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stayfinite.detect import finite
from stayfinite.detect.finite import all_finite, classify, nonfinite
from stayfinite.records import NaNType

KIND_OF = {"nan": NaNType.NAN, "inf": NaNType.POS_INF, "-inf": NaNType.NEG_INF}
EVERY_KIND = [(dtype, kind) for dtype in (*WIDE, *FP8) for kind in kinds_for(dtype)]
relaxed = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def values(dtype: torch.dtype, fill: str, seed: int = 0, shape: tuple[int, int] = (6, 4)) -> Tensor:
    """Finite values: random, or the largest there are, where sums overflow."""
    if dtype is torch.float8_e8m0fnu:  # powers of two only
        return torch.ones(shape).to(dtype)
    largest = torch.finfo(dtype).max
    if fill == "largest":
        return torch.full(shape, largest, dtype=torch.float64).to(dtype)
    if fill == "largest of both signs":
        signs = torch.arange(shape[0] * shape[1]).reshape(shape) % 2 * 2.0 - 1.0
        return (signs.double() * largest).to(dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def planted(x: Tensor, bad: float, where: int) -> Tensor:
    if x.dtype in FP8:  # fill_ is missing for some of them
        wide = x.float()
        wide.view(-1)[where] = bad
        return wide.to(x.dtype)
    x.view(-1)[where] = bad
    return x


def bads(dtype: torch.dtype) -> tuple[float, ...]:
    return BAD[:1] if dtype in NAN_ONLY or dtype is torch.float8_e8m0fnu else BAD


@st.composite
def tensor_lists(draw: st.DrawFn) -> tuple[list[Any], int | None]:
    """A list of tensors of any kind, and which of them is bad."""
    fills = st.sampled_from(["random", "largest", "largest of both signs"])
    picks = draw(st.lists(st.sampled_from(EVERY_KIND), min_size=1, max_size=6))
    guilty = draw(st.none() | st.integers(0, len(picks) - 1))
    tensors: list[Any] = []
    for number, (dtype, kind) in enumerate(picks):
        x = values(dtype, draw(fills), draw(st.integers(0, 99)))
        if number == guilty:
            x = planted(x, draw(st.sampled_from(bads(dtype))), draw(st.integers(0, 23)))
        tensors.append(make(kind, x))
    return tensors, guilty


@relaxed
@given(tensor_lists(), st.booleans(), st.booleans())
def test_no_miss_and_no_false_alarm(
    drawn: tuple[list[Any], int | None], writable: bool, exact: bool
) -> None:
    tensors, guilty = drawn
    mixed = [None, *tensors, torch.tensor([1, 2]), "text", torch.empty(0)]
    flag = nonfinite(mixed, writable=writable, exact_on_device=exact)
    assert flag.dtype is torch.bool
    assert flag.shape == ()
    assert bool(flag) == (guilty is not None)
    assert all_finite(mixed, writable=writable) == (guilty is None)
    assert [classify(t) is not NaNType.NONE for t in tensors] == [
        number == guilty for number in range(len(tensors))
    ]


@pytest.mark.parametrize(("dtype", "kind"), EVERY_KIND, ids=str)
def test_each_kind_is_seen_as_what_it_holds(dtype: torch.dtype, kind: str) -> None:
    assert classify(make(kind, values(dtype, "largest"))) is NaNType.NONE
    for bad in bads(dtype):
        tensor = make(kind, planted(values(dtype, "random"), bad, 1))
        turned = -bad if kind in ("negated", "conjugated") else bad
        assert classify(tensor) is KIND_OF[str(turned)]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("numel", [1, 7, 8, 31, 33, 1000, finite.SMALL, finite.SMALL + 1, 200_001])
def test_a_bad_value_is_seen_at_either_end(dtype: torch.dtype, numel: int) -> None:
    for where in (0, numel // 2, numel - 1):
        for bad in BAD:
            x = planted(values(dtype, "random", shape=(numel, 1)), bad, where)
            for writable in (True, False):
                assert nonfinite([x], writable=writable)
                assert not all_finite([x], writable=writable)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("writable", [True, False])
def test_scanning_changes_no_byte_and_no_version(bits: int, writable: bool) -> None:
    integers = {16: torch.int16, 32: torch.int32}[bits]
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int32) << (bits - 16)
    patterns = (patterns | (patterns >> 7 & 1)).to(integers)  # payloads, subnormals, -0.0
    for dtype in WIDE:
        if dtype.itemsize * 8 != bits:
            continue
        x = patterns.clone().view(dtype)
        version = x._version
        assert nonfinite([x], writable=writable)
        assert torch.equal(x.view(integers), patterns)
        assert x._version == version


def test_memory_that_cannot_be_written_is_only_read() -> None:
    readonly = memoryview(mmap.mmap(-1, 64, prot=mmap.PROT_READ))
    with pytest.warns(UserWarning, match="not writable"):
        tensor = torch.frombuffer(readonly, dtype=torch.float32)
    assert all_finite([tensor])


@pytest.mark.parametrize("writable", [True, False])
def test_gradients_with_a_graph_can_still_be_differentiated(writable: bool) -> None:
    x = torch.randn(5, requires_grad=True)
    (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    saved = grad.detach()
    squared = (grad * grad).sum()
    assert all_finite([grad, saved], writable=writable)
    squared.backward()
    assert all_finite([x.grad])


def test_the_flag_has_no_graph() -> None:
    assert not nonfinite([torch.ones(2, requires_grad=True)]).requires_grad


def test_what_has_no_memory_is_finite() -> None:
    freed = torch.full((9,), math.nan)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.full((3,), math.nan)
    fp4 = torch.full((4,), 255, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    lazy = torch.nn.LazyLinear(3).weight
    nothing = [freed, fake, fp4, lazy, torch.empty(3, device="meta"), torch.empty(0, 3), None]
    assert all_finite([*nothing, True, 3])
    assert not nonfinite(nothing)
    assert all(classify(t) is NaNType.NONE for t in nothing if t is not None)


def test_a_single_tensor_may_stand_for_a_list() -> None:
    assert nonfinite(torch.tensor([1.0, math.nan]))


@pytest.mark.parametrize("scale", [0.5, math.inf])
def test_a_quantized_tensor_is_judged_by_its_scales(scale: float) -> None:
    per_tensor = quiet(torch.quantize_per_tensor)(torch.ones(3), scale, 0, torch.qint8)
    zeros = torch.zeros(2)
    per_channel = quiet(torch.quantize_per_channel)(
        torch.ones(2, 3), torch.tensor([0.5, scale]), zeros, 0, torch.qint8
    )
    assert all_finite([per_tensor]) == math.isfinite(scale)
    assert all_finite([per_channel]) == math.isfinite(scale)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_complex_numbers_are_judged_by_both_parts(dtype: torch.dtype) -> None:
    to = quiet(Tensor.to)
    for bad in BAD:
        assert not all_finite([to(torch.tensor([complex(0, bad)]), dtype)])
        assert not all_finite([to(torch.tensor([complex(bad, 0)]), dtype)])
    assert all_finite([to(torch.ones(3), dtype)])


@pytest.mark.parametrize(
    "transform",
    [
        torch.vmap,
        torch.func.grad,
        lambda f: torch.vmap(torch.func.grad(f)),
        lambda f: torch.vmap(torch.vmap(f)),
        torch.func.functionalize,
    ],
)
@pytest.mark.parametrize("bad", [False, True])
def test_it_sees_through_function_transforms(transform: Any, bad: bool) -> None:
    answers: list[Any] = []

    def look(x: Tensor) -> Tensor:
        answers.append((all_finite([x], writable=True), bool(nonfinite([x])), classify(x)))
        return x.sum()

    x = torch.full((3, 2), math.nan if bad else 1.0)
    transform(look)(x)
    assert answers == [(not bad, bad, NaNType.NAN if bad else NaNType.NONE)]


def test_real_tensors_are_seen_inside_a_fake_mode() -> None:
    x = torch.tensor([math.nan])
    with FakeTensorMode():
        assert not all_finite([x])
        assert type(nonfinite([x])) is Tensor


def test_it_works_in_the_modes_that_users_set() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, math.inf])
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
            for writable in (True, False):
                assert all_finite([good], writable=writable)
                assert not all_finite([good, bad], writable=writable)
                assert bool(nonfinite([bad], writable=writable, exact_on_device=True))
                assert not bool(nonfinite([]))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_class_that_overrides_torch_functions_cannot_hide_a_nan() -> None:
    class Liar(Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any) -> Any:
            raise AssertionError("asked")

    assert not all_finite([torch.tensor([math.nan]).as_subclass(Liar)])


def test_the_fused_largest_magnitude_propagates_nan_and_inf() -> None:
    """What is used on CUDA, asked of the CPU: it must be exact."""
    tensors = [torch.tensor([1.0, bad, -2.0], dtype=dtype) for bad in BAD for dtype in WIDE]
    assert not torch.stack(finite._largest(tensors)).isfinite().any()
    largest = [torch.full((9,), -torch.finfo(dtype).max, dtype=dtype) for dtype in WIDE]
    assert torch.stack(finite._largest(largest)).isfinite().all()


def test_flags_of_several_devices_are_not_brought_to_the_cpu() -> None:
    flags = [torch.tensor(1.0), torch.ones((), dtype=torch.bool, device="meta")]
    assert finite._any_of(flags).device.type == "meta"


def test_a_dtensor_is_judged_by_its_local_shard() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        for bad in (1.0, *BAD):
            tensor = distribute_tensor(torch.tensor([1.0, bad]), mesh, [Shard(0)])
            assert all_finite([tensor], writable=True) == math.isfinite(bad)
    finally:
        dist.destroy_process_group()
