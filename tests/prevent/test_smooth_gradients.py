"""Where everything is smooth, gradients are those of the values: torch's own check, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from edges import gradients
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import binary_cross_entropy_with_logits

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
from stayfinite.prevent.ops import (
    log1mexp,
    safe_acos,
    safe_atan2,
    safe_div,
    safe_log,
    safe_norm,
    safe_pow,
    safe_sqrt,
)

MASK = torch.tensor([[True, False, True, True], [True, True, False, False]])
KEYS = torch.tensor([[0.5, -1.0, 2.0, 0.0], [1.0, 0.2, -0.3, 0.1]], dtype=torch.float64)
PLACES = torch.tensor([0.3, 2.6], dtype=torch.float64)
SMOOTH = {
    "safe_log": (1, safe_log),
    "safe_sqrt": (1, safe_sqrt),
    "safe_div": (2, safe_div),
    "safe_pow": (2, safe_pow),
    "safe_pow 2.5": (1, lambda x: safe_pow(x, 2.5)),
    "safe_acos": (1, safe_acos),
    "safe_atan2": (2, safe_atan2),
    "log1mexp": (1, log1mexp),
    "log1mexp of negative": (1, lambda x: log1mexp(-x)),
    "safe_norm": (1, lambda x: safe_norm(x, -1)),
    "safe_norm of all": (1, lambda x: safe_norm(x, (0, 1), keepdim=True)),
    "masked_softmax": (1, lambda x: masked_softmax(x, MASK)),
    "masked_mean": (1, lambda x: masked_mean(x, MASK, 0)),
    "stable_bce": (2, stable_bce),
    "focal": (2, focal),
    "focal, gamma 0.5": (2, lambda x, t: focal(x, t, gamma=0.5, alpha=None)),
    "dice": (2, lambda x, t: dice(x, t, mask=MASK)),
    "dfl_loss": (1, lambda x: dfl_loss(x, PLACES, reduction="none")),
    "kl": (2, kl),
    "info_nce": (2, info_nce),
    "info_nce by temperature": (
        2,
        lambda q, t: info_nce(q, KEYS, temperature=t[0, 0]),
    ),
}


def inputs(count: int) -> list[Tensor]:
    """Well inside of all domains."""
    torch.manual_seed(1)
    return [
        (0.1 + 0.8 * torch.rand(2, 4, dtype=torch.float64)).requires_grad_() for _ in range(count)
    ]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_is_that_of_the_value(name: str) -> None:
    count, function = SMOOTH[name]
    assert gradcheck(function, inputs(count), check_batched_grad=True)


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivative_is_right_too(name: str) -> None:
    count, function = SMOOTH[name]
    assert gradgradcheck(function, inputs(count))


def textbook_giou(a: Tensor, b: Tensor) -> Tensor:
    iou, union, around = textbook_overlap(a, b)
    area = around.prod(-1)
    return 1 - iou + (area - union) / area


def textbook_ciou(a: Tensor, b: Tensor) -> Tensor:
    iou, _, around = textbook_overlap(a, b)
    apart = (a[:, :2] + a[:, 2:] - b[:, :2] - b[:, 2:]) / 2
    sides = [box[:, 2:] - box[:, :2] for box in (a, b)]
    angles = [torch.atan(side[:, 0] / side[:, 1]) for side in sides]
    aspect = 4 / math.pi**2 * (angles[0] - angles[1]) ** 2
    with torch.no_grad():
        alpha = aspect / (1 - iou + aspect)
    return 1 - iou + (apart**2).sum(-1) / (around**2).sum(-1) + alpha * aspect


def textbook_overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shared = (torch.minimum(a, b)[:, 2:] - torch.maximum(a, b)[:, :2]).clamp_min(0).prod(-1)
    union = sum((box[:, 2:] - box[:, :2]).prod(-1) for box in (a, b)) - shared
    return shared / union, union, torch.maximum(a, b)[:, 2:] - torch.minimum(a, b)[:, :2]


@pytest.mark.parametrize(("ours", "textbook"), [(giou, textbook_giou), (ciou, textbook_ciou)])
def test_boxes_have_the_gradient_of_the_textbook(
    ours: Callable[..., Tensor], textbook: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    a, b = (torch.rand(500, 4, dtype=torch.float64) for _ in range(2))
    a, b = (torch.cat([box[:, :2], box[:, :2] + box[:, 2:] + 0.1], -1) for box in (a, b))
    got = gradients(lambda a, b: ours(a, b, reduction="none"), a, b)
    torch.testing.assert_close(got, gradients(textbook, a, b))


def textbook_focal(logits: Tensor, target: Tensor) -> Tensor:
    cross_entropy = binary_cross_entropy_with_logits(logits, target, reduction="none")
    p = logits.sigmoid()
    right = p * target + (1 - p) * (1 - target)
    weight = 0.25 * target + 0.75 * (1 - target)
    return weight * cross_entropy * (1 - right) ** 2


def test_focal_has_the_gradient_of_the_textbook() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(500, dtype=torch.float64) * 5, torch.rand(500).round().double()
    got = gradients(lambda x: focal(x, target, reduction="none"), logits)
    torch.testing.assert_close(got, gradients(lambda x: textbook_focal(x, target), logits))
