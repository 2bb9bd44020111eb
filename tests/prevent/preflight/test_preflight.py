"""preflight(): what is asked of weights, optimizers, batches and precision."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import stayfinite.prevent.preflight.preflight as checking
from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.preflight.preflight import preflight
from stayfinite.prevent.preflight.training_checks import FirstLosses, rising_risks
from stayfinite.prevent.risks import LEVELS, Risk


def net(*, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))


def batch(rows: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 8, generator=generator)
    return x, torch.randint(0, 4, (rows,), generator=generator)


def causes(risks: list[Risk], *, warnings: bool = True) -> list[str]:
    return [risk.cause for risk in risks if risk.is_warning or not warnings]


def test_a_sound_training_has_no_risk() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert preflight(model, optimizer, batch(), functional.cross_entropy) == []


def test_example_in_the_docstring() -> None:
    done = doctest.testmod(checking)
    assert done.attempted
    assert not done.failed


def test_risks_come_ranked() -> None:
    model = net()
    nn.init.constant_(model[0].weight, float("nan"))
    nn.init.zeros_(model[2].weight)
    found = preflight(model)
    order = [LEVELS.index(risk.level) for risk in found]
    assert order == sorted(order)
    assert [risk.where for risk in found] == ["0.weight", "2.weight"]


def test_many_weights_with_one_problem_are_one_risk() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)])
    for layer in model:
        nn.init.constant_(layer.weight, 1e6)
    (risk,) = preflight(model)
    assert risk.evidence == {"tensors": 9}
    assert risk.what.endswith("the same of 1.weight, 2.weight, 3.weight and 5 more.")


def test_twenty_layers_without_a_norm_are_a_risk_and_with_one_are_none() -> None:
    layers = [module for _ in range(20) for module in (nn.Linear(8, 8), nn.ReLU())]
    bare = preflight(nn.Sequential(*layers))
    assert [risk.evidence for risk in bare] == [{"layers": 20}]
    assert preflight(nn.Sequential(*layers, nn.LayerNorm(8))) == []


@pytest.mark.parametrize(
    ("optimizer", "cause"),
    [
        (lambda p: torch.optim.SGD(p, lr=float("nan")), "bad_lr_schedule"),
        (lambda p: torch.optim.SGD(p, lr=1e4), "lr_too_high"),
        (lambda p: torch.optim.Adam(p, lr=5.0), "lr_too_high"),
        (lambda p: torch.optim.LBFGS(p), "lbfgs_no_line_search"),
    ],
)
def test_optimizers_that_will_fail(optimizer: Any, cause: str) -> None:
    model = net()
    found = preflight(model, optimizer(model.parameters()), batch(), functional.cross_entropy)
    assert causes(found) == [cause]


def test_the_rate_at_the_end_of_a_warm_up_counts_for_adam() -> None:
    def found(rate: float) -> list[Risk]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        assert optimizer.param_groups[0]["lr"] == 0
        return preflight(model, optimizer, batch(), functional.cross_entropy)

    assert found(1e-2) == []
    (risk,) = found(1.0)
    assert (risk.level, risk.cause) == ("medium", "lr_too_high")
    assert risk.what.endswith("the learning rate is too high where its warm-up ends.")


def test_one_small_layer_does_not_make_a_rate_too_high() -> None:
    model = net()
    nn.init.normal_(model[2].weight, std=5e-3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    assert causes(preflight(model, optimizer, batch(), functional.cross_entropy)) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([2.0, 3.0], [16.0], True),
        ([2.0, 3.0], [14.0], False),
        ([-0.1], [2.0], False),
        ([2.0], [], False),
        ([], [2.0], False),
    ],
)
def test_a_loss_that_jumps_after_one_update_is_a_risk(
    before: list[float], after: list[float], expected: bool
) -> None:
    found = list(rising_risks({"train.py:7": FirstLosses(before=before, after=after)}))
    assert bool(found) == expected


def test_an_eps_that_float16_loses_is_a_risk() -> None:
    model = net().half()
    assert causes(preflight(model, torch.optim.AdamW(model.parameters()))) == ["optimizer_eps"]
    assert preflight(model, torch.optim.AdamW(model.parameters(), eps=1e-4)) == []


def test_float16_weights_want_a_loss_scale() -> None:
    x, y = batch()
    found = preflight(net().half(), None, (x.half(), y), functional.cross_entropy)
    assert causes(found) == ["low_precision_underflow"]


def test_headroom_of_float16_is_measured_by_module() -> None:
    model = net()
    with torch.no_grad():
        model[2].weight.mul_(1e5)
    (risk,) = [
        risk
        for risk in preflight(model, None, batch(), functional.cross_entropy, "fp16")
        if risk.cause == "low_precision_overflow"
    ]
    assert risk.where == "2"
    assert risk.is_warning
    assert 0 < risk.evidence["headroom_bits"] < 2


def test_headroom_is_no_risk_in_bfloat16() -> None:
    model = net()
    with torch.no_grad():
        model[2].weight.mul_(100)
    found = preflight(model, None, batch(), functional.cross_entropy, "bf16")
    assert "low_precision_overflow" not in causes(found, warnings=False)


def test_inputs_in_their_own_units_are_a_risk() -> None:
    x, y = batch()
    found = preflight(net(), None, (x * 1000, y), functional.cross_entropy)
    assert "unnormalized_input" in causes(found)


def test_labels_that_the_loss_refuses_are_a_risk_and_no_error() -> None:
    x, y = batch()
    found = preflight(net(), None, (x, y + 2), functional.cross_entropy)
    assert causes(found)[0] == "bad_label"


def test_labels_that_are_all_ignored_are_a_risk() -> None:
    x, y = batch()
    found = preflight(net(), None, (x, torch.full_like(y, -100)), functional.cross_entropy)
    assert found[0].level == "high"
    assert "bad_label" in causes(found)


def test_an_empty_batch_is_a_risk_and_no_error() -> None:
    found = preflight(net(), None, batch(0), functional.cross_entropy)
    assert found[0].level == "high"


def test_complex_weights_are_looked_at_without_a_warning() -> None:
    model = nn.Linear(8, 4, dtype=torch.cfloat)
    x = batch()[0].to(torch.cfloat)
    found = preflight(model, None, (x, x), lambda out, _: out.abs().square().sum())
    assert causes(found) == []


def test_nan_in_the_batch_is_a_risk_if_the_loss_sees_it() -> None:
    x, y = batch()
    x[3, 2] = float("nan")
    seen = preflight(net(), None, (x, y), functional.cross_entropy)
    assert "bad_input_data" in causes(seen)
    hidden = nn.Sequential(NanToZero(), *net())
    assert preflight(hidden, None, (x, y), functional.cross_entropy)[0].level == "low"


class NanToZero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.nan_to_num(0.0)


def test_batch_norm_over_two_values_is_a_risk() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    assert "batchnorm_degenerate" in causes(
        preflight(model, None, batch(2), functional.cross_entropy)
    )
    assert "batchnorm_degenerate" not in causes(
        preflight(model, None, batch(), functional.cross_entropy)
    )


class NormOfInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt((x * x).sum(-1, keepdim=True)) * x.new_ones(4)


def test_the_probe_proves_what_the_ranges_suspect() -> None:
    layer = nn.Linear(8, 8, bias=False)
    found = preflight(nn.Sequential(layer, NormOfInput()), None, batch(), functional.cross_entropy)
    (risk,) = [risk for risk in found if risk.cause == "sqrt_grad_at_zero"]
    assert risk.evidence["probe"] == "zeros"
    assert "A pass with zeros shows it." in risk.what


class Pole(nn.Module):
    """Inf at 1, which no formula of ours knows: erfinv of a floor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.zeta(1 + (x - 1).abs(), torch.ones(())) * 1e-3


def test_the_probe_finds_what_the_ranges_do_not_know() -> None:
    found = preflight(
        nn.Sequential(Pole(), nn.Linear(8, 4)), None, batch(), functional.cross_entropy
    )
    assert [risk.evidence.get("probe") for risk in found if risk.is_warning] == ["ones"]


def test_what_is_wrong_already_is_said_first() -> None:
    found = preflight(net(), None, batch(), lambda out, y: torch.log(out - out).mean())
    assert found[0].what.startswith("The loss is not finite in the first steps")
    assert found[0].cause == "log_of_zero"


def test_a_recurrence_that_grows_is_a_risk() -> None:
    class Cell(nn.Module):
        def __init__(self, gain: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(gain * torch.eye(8))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(12):
                x = torch.relu(x @ self.weight)
            return x

    assert causes(preflight(Cell(1.5), batch=batch()[0])) == ["exploding_recurrence"]
    assert causes(preflight(Cell(1.0), batch=batch()[0])) == []


def test_a_norm_that_is_differentiated_twice_is_a_risk() -> None:
    def penalty(out: Tensor, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((x @ x.t()).norm(dim=1).sum(), x, create_graph=True)
        return gradient.pow(2).sum() * 1e-3 + out.sum()

    found = preflight(net(), None, (batch()[0], batch()[0]), penalty)
    assert causes(found) == ["norm_grad_at_zero"]


def test_compiled_models_are_looked_into() -> None:
    class Risky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(torch.softmax(x, -1))

    model = torch.compile(nn.Sequential(nn.Linear(8, 4), Risky()), backend="aot_eager")
    assert causes(preflight(model, None, batch(), functional.nll_loss)) == ["log_of_zero"]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"model": "model"}, InputError, "it must be a torch.nn.Module"),
        ({"model": net(), "optimizer": 3}, InputError, "it must be a torch.optim.Optimizer"),
        ({"model": net(), "precision": "half"}, ConfigError, "fp32, fp16, bf16"),
        ({"model": net(), "batch": DataLoader(batch()[0])}, InputError, "give one batch of it"),
        ({"model": net(), "batch": iter([batch()])}, InputError, "give one batch of it"),
        ({"model": nn.LazyLinear(3), "batch": batch()[0]}, InputError, "lazy parameters"),
        ({"model": nn.Linear(3, 3, device="meta")}, InputError, "meta device"),
    ],
)
def test_what_it_does_not_accept(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        preflight(**given)
