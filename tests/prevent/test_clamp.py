"""Activations stay in range, NaN stays NaN, all of it is counted, and it can be taken away."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.clamp import ClampCount, clamp_activations


class Loud(nn.Module):
    """Gives 1000 times its input, in the shape that it is asked for."""

    def __init__(self, shape: Any = None) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        loud = x * 1000
        return self.shape(loud) if self.shape else loud


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_hooks) for module in model.modules()]


def two_layers() -> nn.Sequential:
    return nn.Sequential(Loud(), nn.Sequential(nn.Linear(3, 3), Loud()))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def test_outputs_stay_in_range_and_are_counted() -> None:
    model = nn.Sequential(Loud())
    clamp = clamp_activations(model, -5, 7)
    assert model(torch.tensor([[-1.0, 0.001, 1.0]])).tolist() == [[-5.0, 1.0, 7.0]]
    model(torch.tensor([[1.0, 1.0]]))
    assert clamp.counts == {"0": ClampCount(elements=5, clamped=4, nan=0)}


def test_nan_passes_and_is_counted() -> None:
    model = nn.Sequential(Loud())
    clamp = clamp_activations(model, -5, 5)
    out = model(torch.tensor([math.nan, math.inf, -math.inf]))
    assert out[0].isnan()
    assert out[1:].tolist() == [5.0, -5.0]
    assert clamp.counts["0"] == ClampCount(elements=3, clamped=2, nan=1)


def test_gradient_stops_where_it_clamps() -> None:
    model, x = nn.Sequential(Loud()), torch.tensor([1.0, 0.001], requires_grad=True)
    clamp_activations(model, -5, 5)
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1000.0]


def test_removed_clamps_leave_nothing_behind() -> None:
    model = two_layers()
    before, x = hooks(model), torch.randn(2, 3)
    expected = model(x)
    clamp = clamp_activations(model, -1, 1)
    assert model(x).abs().max() <= 1
    clamp.remove()
    clamp.remove()
    assert hooks(model) == before
    assert torch.equal(model(x), expected)
    assert clamp.counts["0"].elements == 6


def test_a_with_block_removes_them_also_after_an_error() -> None:
    model = two_layers()
    before = hooks(model)
    with pytest.raises(ZeroDivisionError), clamp_activations(model, -1, 1):
        raise ZeroDivisionError
    assert hooks(model) == before


def test_a_range_beyond_all_outputs_changes_nothing() -> None:
    model, x = two_layers(), torch.randn(2, 3)
    expected = model(x)
    with clamp_activations(model, -math.inf, 1e300) as clamp:
        assert torch.equal(model(x), expected)
    assert all(count.clamped == 0 for count in clamp.counts.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_limits_beyond_the_dtype_are_its_own(dtype: torch.dtype) -> None:
    model = nn.Sequential(Loud())
    clamp_activations(model, -math.inf, math.inf)
    out = model(torch.tensor([torch.finfo(dtype).max], dtype=dtype))
    assert out.dtype == dtype
    assert out.item() == torch.finfo(dtype).max


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(lambda x: {"a": [x, (x,)], "b": "text"}, id="nested"),
        pytest.param(lambda x: Pair(x, x), id="named tuple"),
        pytest.param(
            lambda x: nn.utils.rnn.pack_padded_sequence(x[None, :, None], [3], batch_first=True),
            id="packed sequence",
        ),
    ],
)
def test_outputs_of_any_structure(shape: Any) -> None:
    model, x = nn.Sequential(Loud(shape)), torch.ones(3)
    expected = model(x)
    with clamp_activations(model, -5, 5):
        got = model(x)
    assert type(got) is type(expected)
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(got) if isinstance(leaf, Tensor)]
    loud = [tensor for tensor in tensors if tensor.is_floating_point()]
    assert loud
    assert all(tensor.max() == 5 for tensor in loud)


def test_what_is_not_a_plain_float_is_left_alone() -> None:
    for shape in (Tensor.long, Tensor.bool, Tensor.to_sparse, lambda x: x.to(torch.complex64)):
        model, x = nn.Sequential(Loud(shape)), torch.ones(3)
        expected = model(x)
        with clamp_activations(model, -5, 5) as clamp:
            got = model(x)
        assert torch.equal(got.to_dense(), expected.to_dense())
        assert clamp.counts == {}


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, {"0", "1", "1.0", "1.1"}),
        (["1.0"], {"1.0"}),
        (["1.*"], {"1.0", "1.1"}),
        ([Loud], {"0", "1.1"}),
        (["0", nn.Linear], {"0", "1.0"}),
    ],
)
def test_modules_are_chosen(chosen: Any, names: set[str]) -> None:
    model = two_layers()
    clamp = clamp_activations(model, -1, 1, modules=chosen)
    model(torch.randn(2, 3))
    assert set(clamp.counts) == names


def test_a_module_itself_can_be_chosen() -> None:
    model = two_layers()
    clamp = clamp_activations(model, -1, 1, modules=[model[0]])
    model(torch.randn(2, 3))
    assert set(clamp.counts) == {"0"}


def test_losses_are_left_alone() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.loss = Loud(), nn.MSELoss()

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.loss(self.body(x), torch.zeros_like(x))
            return loss

    model = WithLoss()
    clamp = clamp_activations(model, -5, 5)
    assert model(torch.ones(2)).item() == 25.0
    assert set(clamp.counts) == {"body"}


def test_counting_goes_on_after_inference_mode() -> None:
    model = nn.Sequential(Loud())
    clamp = clamp_activations(model, -5, 5)
    with torch.inference_mode():
        model(torch.ones(2))
    model(torch.ones(2, requires_grad=True)).sum().backward()
    assert clamp.counts["0"].clamped == 4


def test_it_says_that_it_is_a_crutch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stayfinite"):
        clamp_activations(two_layers(), -1, 1)
    (record,) = caplog.records
    assert "4 modules within [-1, 1]. That is a crutch" in record.getMessage()


def test_clamps_are_compiled_with_the_model_once() -> None:
    model, x = nn.Sequential(Loud()), torch.tensor([1.0, math.nan])
    clamp, graphs = clamp_activations(model, -5, 5), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    outs = [compiled(x) for _ in range(20)]
    torch.compiler.reset()
    assert [out[0].item() for out in outs] == [5.0] * 20
    assert clamp.counts["0"] == ClampCount(elements=40, clamped=20, nan=20)
    assert len(graphs) == 1


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 1.0), (math.nan, 1.0)])
def test_an_empty_range_is_refused(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="min must be less than max"):
        clamp_activations(nn.Linear(1, 1), low, high)


def test_unknown_modules_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'head', which is not in the model; it has 0, 1, 1\.0"):
        clamp_activations(two_layers(), -1, 1, modules=["head"])
    with pytest.raises(ConfigError, match="Conv2d, which is not in the model"):
        clamp_activations(two_layers(), -1, 1, modules=[nn.Conv2d])


def test_only_modules_are_accepted() -> None:
    with pytest.raises(InputError, match=r"model is a list; it must be a torch\.nn\.Module"):
        clamp_activations([nn.Linear(1, 1)], -1, 1)  # type: ignore[arg-type]
