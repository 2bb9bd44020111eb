"""What is masked out does not count, whatever it is; nothing kept is 0, not NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from edges import gradients
from torch import Tensor

from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.losses import (
    ciou,
    dfl_loss,
    dice,
    focal,
    giou,
    info_nce,
    kl,
    masked_mean,
    masked_softmax,
    stable_bce,
)
from stayfinite.prevent.ops import safe_norm

KEEP = torch.tensor([[True, True, False], [True, False, True]])
WORST = [math.nan, math.inf, -math.inf, 3e38]


def losses(mask: Tensor, rows: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    labels, places = torch.tensor([[0.0, 1.0, 1.0]] * 2), torch.tensor([0.5, 2.0])
    return {
        "stable_bce": lambda x: stable_bce(x, labels, mask=mask),
        "focal": lambda x: focal(x, labels, mask=mask),
        "dice": lambda x: dice(x, labels, mask=mask),
        "masked_mean": lambda x: masked_mean(x, mask),
        "masked_softmax": lambda x: masked_softmax(x, mask).square().sum(),
        "dfl_loss": lambda x: dfl_loss(x, places, mask=rows),
        "kl": lambda x: kl(x, labels, mask=rows),
        "kl of q": lambda x: kl(labels, x, mask=rows),
    }


@pytest.mark.parametrize("worst", WORST)
@pytest.mark.parametrize("name", losses(KEEP, KEEP))
def test_what_is_masked_out_does_not_matter(name: str, worst: float) -> None:
    rows = torch.tensor([True, False])
    function = losses(KEEP, rows)[name]
    kept = rows[:, None].expand_as(KEEP) if name[:2] in ("df", "kl") else KEEP
    x = torch.tensor([[0.3, -1.0, 2.0], [0.1, 0.7, -0.4]])
    value, (gradient,) = gradients(function, x)
    same, (same_gradient,) = gradients(function, torch.where(kept, x, worst))
    assert torch.equal(same, value)
    assert torch.equal(same_gradient, gradient)
    assert not gradient[~kept].any()


@pytest.mark.parametrize("name", losses(KEEP, KEEP))
def test_nothing_kept_is_zero(name: str) -> None:
    function = losses(torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, dtype=torch.bool))[name]
    value, (gradient,) = gradients(function, torch.full((2, 3), 2.0))
    assert value.item() == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda x, **how: stable_bce(x, x, **how),
        lambda x, **how: focal(x, x, **how),
        lambda x, **how: dice(x, x, **how),
        lambda x, **how: dfl_loss(x, x[:, 0], **how),
        lambda x, **how: kl(x, x, **how),
        lambda x, **how: info_nce(x, x, **how),
        lambda x, **how: giou(x, x, **how),
        lambda x, **how: ciou(x, x, **how),
    ],
)
def test_an_empty_batch_is_harmless(loss: Callable[..., Tensor], reduction: str) -> None:
    value, (gradient,) = gradients(lambda x: loss(x, reduction=reduction), torch.zeros(0, 4))
    assert value.sum().item() == 0.0
    assert gradient.shape == (0, 4)


def test_a_row_without_keys_gives_zeros_beside_healthy_ones() -> None:
    scores = torch.tensor([[1.0, 1.0], [5.0, 5.0]])
    mask = torch.tensor([[True, True], [False, False]])
    assert masked_softmax(scores, mask).tolist() == [[0.5, 0.5], [0.0, 0.0]]


def test_softmax_over_another_dimension_and_a_broadcast_mask() -> None:
    scores, mask = torch.randn(2, 3, 4), torch.tensor([True, False, True])[:, None]
    got = masked_softmax(scores, mask, dim=1)
    torch.testing.assert_close(got.sum(1), torch.ones(2, 4))
    assert not got[:, 1].any()


def test_kept_scores_at_the_very_bottom_still_share_the_row() -> None:
    lowest = torch.finfo(torch.float32).min
    row = masked_softmax(torch.tensor([lowest, lowest, 0.0]), torch.tensor([True, True, False]))
    assert row.tolist() == [0.5, 0.5, 0.0]


def test_means_along_a_dimension() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert masked_mean(x, KEEP, 1).tolist() == [0.5, 4.0]
    assert masked_mean(x, KEEP, (0, 1), keepdim=True).tolist() == [[2.25]]
    assert masked_mean(x).item() == 2.5
    assert masked_mean(torch.tensor([1, 2])).item() == 1.5


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_other_reductions(reduction: Any) -> None:
    x, labels = torch.tensor([[0.0, 3.0]]), torch.tensor([[1.0, 1.0]])
    got = stable_bce(x, labels, mask=torch.tensor([True, False]), reduction=reduction)
    assert got.flatten().tolist() == pytest.approx([math.log(2), 0.0][: got.numel()])


def test_losses_of_half_precision_are_single() -> None:
    x = torch.ones(2, 4, dtype=torch.float16)
    for loss in (stable_bce(x, x), dice(x, x), kl(x, x), info_nce(x, x), giou(x, x)):
        assert loss.dtype == torch.float32
    assert safe_norm(x).dtype == torch.float16


def test_norms_of_nothing_are_zero() -> None:
    assert safe_norm(torch.zeros(2, 0), -1).tolist() == [0.0, 0.0]
    assert safe_norm(torch.zeros(0)).item() == 0.0


def test_boxes_may_be_given_by_any_corners() -> None:
    box, target = torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[1.0, 1.0, 3.0, 4.0]])
    for loss in (giou, ciou):
        expected = loss(box, target).item()
        for order in ([2, 1, 0, 3], [0, 3, 2, 1], [2, 3, 0, 1]):
            assert loss(box[:, order], target).item() == expected


@pytest.mark.parametrize("loss", [giou, ciou])
def test_equal_boxes_cost_nothing_even_flat_ones(loss: Callable[..., Tensor]) -> None:
    boxes = torch.tensor([[1.0, 2.0, 5.0, 7.0], [3.0, 3.0, 3.0, 8.0], [4.0, 4.0, 4.0, 4.0]])
    assert loss(boxes, boxes, reduction="none").tolist() == pytest.approx([0.0] * 3, abs=1e-6)


@pytest.mark.parametrize("loss", [giou, ciou])
def test_a_flat_box_is_drawn_to_its_target(loss: Callable[..., Tensor]) -> None:
    flat, target = torch.tensor([[1.0, 1.0, 1.0, 2.0]]), torch.tensor([[0.0, 0.0, 4.0, 4.0]])
    _, (gradient, _) = gradients(loss, flat, target)
    better = flat - 0.1 * gradient / gradient.norm()
    assert loss(better, target) < loss(flat, target)


def test_learned_temperature_comes_back_from_below_the_coldest() -> None:
    temperature = torch.tensor(-1.0, requires_grad=True)
    info_nce(torch.eye(3).flip(0), torch.eye(3), temperature=temperature).backward()
    assert temperature.grad is not None
    assert temperature.grad < 0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: masked_softmax(torch.ones(3), torch.ones(3)), r"dtype torch\.float32; it must be"),
        (lambda: masked_mean(torch.ones(3), KEEP), r"shape \(2, 3\), which does not broadcast"),
        (lambda: stable_bce(torch.ones(3), torch.ones(3, 1)), "they must have the same shape"),
        (lambda: dfl_loss(torch.ones(3, 4), torch.ones(4)), "with at least 2 bins"),
        (lambda: dfl_loss(torch.ones(3, 1), torch.ones(3)), "with at least 2 bins"),
        (lambda: kl(torch.ones(3), torch.ones(2)), "they must have the same shape"),
        (lambda: info_nce(torch.ones(3), torch.ones(3)), r"both must be \(batch, features\)"),
        (lambda: giou(torch.ones(3, 5), torch.ones(3, 5)), r"both must be \(\.\.\., 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Tensor], said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: stable_bce(x, x, reduction="avg"), "must be one of mean, sum, none"),
        (lambda x: focal(x, x, gamma=-1.0), "gamma is -1.0; it must be at least 0"),
        (lambda x: dice(x, x, smooth=0.0), r"smooth is 0\.0; it must be greater than 0"),
        (lambda x: info_nce(x, x, temperature=0.0), r"temperature is 0\.0; it must be greater"),
    ],
)
def test_options_are_checked(call: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call(torch.ones(2, 2))
