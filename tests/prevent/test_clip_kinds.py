"""Adaptive clipping takes every kind of gradient, and changes nothing that is usual."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import answers
from torch import Tensor, nn
from torch.optim import SGD

import stayfinite
from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.clipping import AdaptiveClipper, Mode, Percentile, PerTensor, Robust, ZScore

NAN, INF = math.nan, math.inf
MODES: tuple[Mode, ...] = ("robust", "percentile", "zscore", "per_unit", "per_tensor")
every_mode = pytest.mark.parametrize("mode", MODES)
# The one with a mind of its own about what is usual clips by weights, and not by a median.
learning_mode = pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "per_unit"])


def gradient_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def norm_of(params: list[nn.Parameter]) -> float:
    gradients = [gradient_of(p).to_dense().to(torch.complex128).abs().flatten() for p in params]
    return float(torch.cat(gradients).norm())


def settled(params: Any, mode: Mode, gradients: list[Tensor], steps: int = 30) -> AdaptiveClipper:
    """A clipper that has seen these gradients for a while."""
    clipper = AdaptiveClipper(params, mode)
    for _ in range(steps):
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
        clipper.clip()
    return clipper


@every_mode
def test_missing_gradients_are_nothing_to_clip(mode: Mode) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    clipper = AdaptiveClipper(model, mode)
    result = clipper.clip()
    assert (result.norm, result.was_clipped, result.kept_elements) == (0.0, False, 0)
    model[0](torch.ones(1, 2)).sum().backward()
    assert clipper.clip().kept_elements == 6
    assert model[1].weight.grad is None


@learning_mode
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_spike_is_clipped_in_every_dtype(mode: Mode, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    params = [
        nn.Parameter(torch.zeros(4, 5, dtype=dtype)),
        nn.Parameter(torch.zeros((), dtype=dtype)),
    ]
    usual = [torch.randn(param.shape).to(dtype) * 0.1 for param in params]
    clipper = settled(params, mode, usual)
    for param, gradient in zip(params, usual, strict=True):
        param.grad = gradient * 1000
    result = clipper.clip()
    assert result.was_clipped
    whole = float(torch.cat([gradient.double().flatten() for gradient in usual]).norm())
    assert 0.1 * whole <= norm_of(params) <= 5.05 * whole


@every_mode
def test_dtypes_are_clipped_together(mode: Mode) -> None:
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    params = [nn.Parameter(torch.ones(3, 2, dtype=kind)) for kind in kinds]
    clipper = AdaptiveClipper(params, mode)
    for size in [1.0] * 20 + [1000.0]:
        for param in params:
            param.grad = torch.full_like(param, size)
        result = clipper.clip()
        assert result.norm == pytest.approx(size * 30**0.5, rel=1e-3)
    assert result.was_clipped
    assert norm_of(params) <= 5.05 * 30**0.5
    assert [gradient_of(param).dtype for param in params] == list(kinds)


def test_units_of_complex_weights_have_the_norm_of_their_magnitudes() -> None:
    weight = nn.Parameter(torch.tensor([[3 + 4j, 0j], [0j, 1e-9j]], dtype=torch.complex64))
    for gradient in (torch.full((2, 2), 3 + 4j), torch.full((2, 2), 3 - 4j).conj()):
        weight.grad = gradient.to(torch.complex64)
        AdaptiveClipper(weight, "per_unit").clip()
        expected = torch.tensor([0.05, 1e-5]) / 50**0.5
        part = gradient_of(weight).resolve_conj()[:, 0] / (3 + 4j)
        assert torch.allclose(part.real, expected)


@every_mode
def test_sparse_gradients_of_embeddings_are_clipped(mode: Mode) -> None:
    torch.manual_seed(0)
    sparse, dense = nn.Embedding(10, 3, sparse=True), nn.Embedding(10, 3)
    dense.load_state_dict(sparse.state_dict())
    clippers = [AdaptiveClipper(each, mode) for each in (sparse, dense)]
    for size in [1.0] * 20 + [1000.0]:
        for each, clipper in zip((sparse, dense), clippers, strict=True):
            each.zero_grad()
            (size * each(torch.tensor([1, 1, 4]))).sum().backward()
            clipper.clip()
        assert torch.allclose(gradient_of(sparse.weight).to_dense(), gradient_of(dense.weight))


def test_other_sparse_gradients_are_one_unit() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.eye(3, 4).to_sparse()
    AdaptiveClipper(weight, "per_unit").clip()
    assert norm_of([weight]) == pytest.approx(0.01 * 12**0.5)


@every_mode
def test_expanded_and_strided_gradients_are_clipped_in_place(mode: Mode) -> None:
    params = [nn.Parameter(torch.ones(4, 2)) for _ in range(2)]
    clipper = AdaptiveClipper(params, mode)
    for size in [1.0] * 20 + [1000.0]:
        params[0].grad = torch.full((2,), size).expand(4, 2)
        params[1].grad = torch.full((2, 4), size).t()
        gradients = [gradient_of(param) for param in params]
        assert clipper.clip().norm == pytest.approx(4 * size)
    assert all(gradient_of(param) is old for param, old in zip(params, gradients, strict=True))
    assert norm_of(params) <= 5.01 * 4
    assert bool((gradients[0] == gradients[0][0, 0]).all())


@every_mode
def test_gradient_that_two_parameters_share_is_clipped_once(mode: Mode) -> None:
    first, second = (nn.Parameter(torch.ones(1, 2)) for _ in range(2))
    clipper = AdaptiveClipper([first, second], mode)
    for size in [1.0] * 20 + [1000.0]:
        first.grad = second.grad = torch.tensor([[0.6, 0.8]]) * size
        assert clipper.clip().norm == pytest.approx(size)
    assert 0.001 <= norm_of([first]) <= 5.01


@every_mode
def test_usual_gradients_are_left_alone_to_the_byte(mode: Mode) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4).bfloat16())]
    patient: dict[str, Any] = {
        "percentile": Percentile(percentile=100.0),
        "zscore": ZScore(deviations=10.0),
        "per_tensor": PerTensor(factor=3.0),
    }
    clipper = AdaptiveClipper(weights, patient.get(mode, mode))
    for _ in range(150):
        for weight in weights:
            weight.grad = 1e-3 * (torch.randn(weight.shape) * 0.1 + 1).to(weight.dtype)
        before = [gradient_of(weight).view(torch.uint8).clone() for weight in weights]
        assert not clipper.clip().was_clipped
        after = [gradient_of(weight).view(torch.uint8) for weight in weights]
        assert all(map(torch.equal, before, after))


@every_mode
def test_gradient_with_a_graph_can_be_clipped(mode: Mode) -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    (weight.grad,) = torch.autograd.grad((weight**2).sum(), weight, create_graph=True)
    assert AdaptiveClipper(weight, mode).clip().norm == pytest.approx(10.0)
    weight.grad = None  # the graph and the gradient hold one another


@every_mode
def test_targets_of_every_kind_give_the_same(mode: Mode) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    copies = [copy.deepcopy(model) for _ in range(4)]
    clippers = [
        AdaptiveClipper(copies[0], mode),
        AdaptiveClipper(SGD(copies[1].parameters(), lr=0.1), mode),
        AdaptiveClipper(copies[2].parameters(), mode),  # an iterator, that is used up
        AdaptiveClipper(list(copies[3].parameters()), mode, names=["a", "b", "c", "d"]),
    ]
    for size in [1.0] * 20 + [1000.0]:
        for each in copies:
            each.zero_grad()
            (size * each(torch.ones(2, 3))).sum().backward()
        results = [clipper.clip() for clipper in clippers]
        assert len({result.norm for result in results}) == 1
        gradients = [[gradient_of(p).tolist() for p in each.parameters()] for each in copies]
        assert all(each == gradients[0] for each in gradients)
    assert results[-1].was_clipped


def test_tensors_that_were_clipped_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    clipper = AdaptiveClipper(model, PerTensor(factor=2.0, warmup=5))
    for step in range(20):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.01)
        if step == 19:
            gradient_of(model[1].weight).mul_(100)
        result = clipper.clip()
    assert result.clipped == ("1.weight",)
    assert set(clipper.thresholds) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert clipper.threshold == INF


def test_accumulated_gradients_are_one_sample() -> None:
    """What counts is the norm at the time of the clip, once for each update."""
    model = nn.Linear(2, 1, bias=False)
    clipper = AdaptiveClipper(model, Robust(warmup=1))
    for _ in range(4):
        model.zero_grad()
        for _ in range(4):
            model(torch.tensor([[0.6, 0.8]])).sum().backward()
        clipper.clip()
    assert clipper.threshold == pytest.approx(3 * 4)
    assert len(clipper.state_dict()["logs"]) == 4


class Trained:
    """A small training with a clipper, and perhaps a scaler whose scale moves all the time."""

    def __init__(self, mode: Mode, scaler: torch.amp.GradScaler | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = SGD(self.model.parameters(), lr=0.01)
        self.clipper = AdaptiveClipper(self.model, mode)
        self.scaler = scaler

    def step(self, x: Tensor, *, overflow: bool = False) -> None:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if overflow:
            gradient_of(self.model.weight)[0, 0] = INF
        if self.scaler is None:
            self.clipper.clip()
            self.optimizer.step()
        else:
            self.scaler.unscale_(self.optimizer)
            self.clipper.clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()


def same_state(first: AdaptiveClipper, second: AdaptiveClipper) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@learning_mode
def test_scale_and_its_overflows_leave_no_trace_in_unscaled_norms(mode: Mode) -> None:
    plain = Trained(mode, None)
    scaled = Trained(mode, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3))
    batches = torch.randn(30, 8, 4)
    for number, batch in enumerate(batches):
        plain.step(batch)
        scaled.step(batch)
        if number % 10 == 5:
            scaled.step(batch, overflow=True)  # which the scaler skips
    assert same_state(plain.clipper, scaled.clipper)
    assert torch.equal(plain.model.weight, scaled.model.weight)


@learning_mode
def test_step_with_bad_values_is_clipped_but_not_learnt_from(mode: Mode) -> None:
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    usual = [torch.full((3,), 0.1), torch.full((2,), 0.1)]
    clipper = settled(params, mode, usual)
    before = settled(params, mode, usual)
    params[0].grad = torch.tensor([NAN, 1e30, INF])
    params[1].grad = torch.tensor([1e30, NAN])
    result = clipper.clip()
    assert (result.dropped, result.dropped_elements) == (("0", "1"), 3)
    assert result.was_clipped
    assert norm_of(params) <= 5.01 * 0.5**0.5
    assert same_state(clipper, before)


@every_mode
def test_bad_gradients_can_be_left_for_the_guard(mode: Mode) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    clipper = AdaptiveClipper(model, mode, drop="nothing")
    with stayfinite.watch(model, optimizer, sinks=[]) as guard:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if step == 2:
                gradient_of(model.weight)[0, 0] = NAN
            before = gradient_of(model.weight).clone()
            result = clipper.clip()
            if step == 2:
                assert math.isnan(result.norm)
                assert not result.was_clipped
                assert torch.equal(gradient_of(model.weight).isnan(), before.isnan())
            optimizer.step()
    (incident,) = guard.incidents
    assert incident.step == 2
    assert bool(model.weight.isfinite().all())


DDP = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from stayfinite.prevent.clipping import AdaptiveClipper
said = {}
for mode in ("robust", "percentile", "zscore", "per_unit", "per_tensor"):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    clipper = AdaptiveClipper(model, mode)
    data = torch.Generator().manual_seed(me)
    for step in range(40):
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=data) * (1000 if step == 35 and me == 1 else 1)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        was_clipped = clipper.clip().was_clipped
        optimizer.step()
    weights = [p.tolist() for p in model.parameters()]
    said[mode] = [clipper.threshold, clipper.thresholds, weights]
"""


def test_ranks_learn_the_same(tmp_path: Path) -> None:
    first, second = answers(tmp_path, DDP)
    assert first == second


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda p: AdaptiveClipper(p, "median"),
            "mode is 'median'; it must be one of robust, perc",
        ),
        (lambda p: AdaptiveClipper(p, 3), "mode is 3; it must be one of robust"),
        (lambda p: AdaptiveClipper(p, drop="rows"), "drop is 'rows'; it must be one of elements"),
        (lambda p: Robust(window=1), "window is 1; it must be a whole number of at least 2"),
        (lambda p: Robust(least=6.0), "least is 6.0 and most is 5.0"),
        (lambda p: Robust(max_norm=NAN), "max_norm is nan; it must be a number greater than 0"),
        (lambda p: Percentile(percentile=101), "percentile is 101; it must be between 0 and 100"),
        (lambda p: ZScore(decay=1.5), "decay is 1.5; it must be between 0 and 1"),
        (lambda p: ZScore(window=10), "window is 10; it must be a whole number of at least 25"),
        (lambda p: PerTensor(factor=0.0), "factor is 0.0; it must be a finite number greater"),
    ],
)
def test_wrong_options_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(nn.Parameter(torch.zeros(1)))


def test_wrong_targets_are_refused() -> None:
    with pytest.raises(InputError, match="got a str among the parameters"):
        AdaptiveClipper(["weight"])  # type: ignore[list-item]


def test_ceiling_holds_from_the_first_step() -> None:
    weight = nn.Parameter(torch.zeros(2))
    clipper = AdaptiveClipper(weight, Robust(max_norm=1.0))
    for _ in range(20):
        weight.grad = torch.tensor([30.0, 40.0])
        result = clipper.clip()
        assert (result.norm, result.max_norm) == (50.0, 1.0)
        assert norm_of([weight]) == pytest.approx(1.0)
    assert clipper.threshold == 1.0
