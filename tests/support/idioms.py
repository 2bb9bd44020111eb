"""Losses as people write them: some can stop being finite, on the line that says so, some cannot.

Each takes `out`, the [32, 16] output of a small network, and `given`: what else a loss may need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional

Idiom = Callable[[Tensor, "Given"], Tensor]
RISKY: dict[Idiom, str] = {}
SAFE: list[Idiom] = []


def _rows() -> Tensor:
    return torch.randn(32, 16)


@dataclass
class Given:
    """Data and parameters beside the network's output."""

    x: Tensor = field(default_factory=_rows)
    labels: Tensor = field(default_factory=lambda: torch.randint(0, 16, (32,)))
    target: Tensor = field(default_factory=lambda: torch.randn(32))
    other: Tensor = field(default_factory=lambda: nn.Parameter(torch.randn(16, 16)))
    gamma: Tensor = field(default_factory=lambda: nn.Parameter(torch.tensor(0.8)))
    temperature: Tensor = field(default_factory=lambda: nn.Parameter(torch.tensor(0.07)))
    log_scale: Tensor = field(default_factory=lambda: nn.Parameter(torch.tensor(2.0)))


def risky(cause: str) -> Callable[[Idiom], Idiom]:
    def note(idiom: Idiom) -> Idiom:
        RISKY[idiom] = cause
        return idiom

    return note


def safe(idiom: Idiom) -> Idiom:
    SAFE.append(idiom)
    return idiom


@risky("log_of_zero")
def log_of_sigmoid(out: Tensor, given: Given) -> Tensor:
    p = torch.sigmoid(out[:, 0])
    return -torch.log(p).mean()  # guilty


@risky("log_of_zero")
def log_of_one_minus_sigmoid(out: Tensor, given: Given) -> Tensor:
    p = torch.sigmoid(out[:, 0])
    return -torch.log(1 - p).mean()  # guilty


@risky("log_of_zero")
def entropy_of_softmax(out: Tensor, given: Given) -> Tensor:
    p = out.softmax(-1)
    return (p * p.log()).sum(-1).mean()  # guilty


@risky("log_of_zero")
def log_of_variance(out: Tensor, given: Given) -> Tensor:
    return torch.log(out.var(dim=1)).mean()  # guilty


@risky("log_of_zero")
def log_of_squashed(out: Tensor, given: Given) -> Tensor:
    action = torch.tanh(out)
    return torch.log(1 - action.pow(2)).mean()  # guilty


@risky("log_of_zero")
def logit_of_sigmoid(out: Tensor, given: Given) -> Tensor:
    return torch.logit(torch.sigmoid(out)).mean()  # guilty


@risky("log_of_zero")
def kl_by_hand(out: Tensor, given: Given) -> Tensor:
    p, q = out.softmax(-1), given.other[given.labels].softmax(-1)
    return (p * (p / q).log()).sum(-1).mean()  # guilty


@risky("log_of_negative")
def log1p_of_layer(out: Tensor, given: Given) -> Tensor:
    return torch.log1p(out[:, 0]).mean()  # guilty


@risky("gumbel_log_zero")
def gumbel_noise(out: Tensor, given: Given) -> Tensor:
    noise = -torch.log(-torch.log(torch.rand(32, 16)))  # guilty
    return (out + noise).softmax(-1).pow(2).mean()


@risky("exp_overflow")
def poisson(out: Tensor, given: Given) -> Tensor:
    return (torch.exp(out[:, 0]) - given.target * out[:, 0]).mean()  # guilty


@risky("sqrt_grad_at_zero")
def root_mean_square_error(out: Tensor, given: Given) -> Tensor:
    return torch.sqrt(functional.mse_loss(out[:, 0], given.target))  # guilty


@risky("sqrt_grad_at_zero")
def pairwise_distance(out: Tensor, given: Given) -> Tensor:
    squares = ((out[:, None] - out[None]) ** 2).sum(-1)
    return squares.sqrt().mean()  # guilty


@risky("sqrt_grad_at_zero")
def signed_root(out: Tensor, given: Given) -> Tensor:
    return (out.sign() * out.abs().sqrt()).mean()  # guilty


@risky("sqrt_of_negative")
def sine_of_cosine(out: Tensor, given: Given) -> Tensor:
    cosine = functional.linear(functional.normalize(out), functional.normalize(given.other))
    return torch.sqrt(1.0 - cosine.pow(2)).mean()  # guilty


@risky("pow_of_negative")
def fractional_power(out: Tensor, given: Given) -> Tensor:
    return (out**1.5).mean()  # guilty


@risky("pow_grad_at_zero")
def learned_power(out: Tensor, given: Given) -> Tensor:
    return torch.relu(out).pow(given.gamma).mean()  # guilty


@risky("acos_domain")
def angle_of_cosine(out: Tensor, given: Given) -> Tensor:
    cosine = functional.cosine_similarity(out, given.other[given.labels])
    return torch.acos(cosine).mean()  # guilty


@risky("acos_domain")
def atanh_of_tanh(out: Tensor, given: Given) -> Tensor:
    return torch.atanh(torch.tanh(out)).mean()  # guilty


@risky("atan2_grad_at_zero")
def phase(out: Tensor, given: Given) -> Tensor:
    return torch.atan2(out[:, 0], out[:, 1]).mean()  # guilty


@risky("division_by_zero")
def normalised_relu(out: Tensor, given: Given) -> Tensor:
    weights = functional.relu(out)
    return (weights / weights.sum(-1, keepdim=True)).pow(2).mean()  # guilty


@risky("division_by_zero")
def standardised(out: Tensor, given: Given) -> Tensor:
    return ((out - out.mean(0)) / out.std(0)).pow(4).mean()  # guilty


@risky("division_by_zero")
def over_variance(out: Tensor, given: Given) -> Tensor:
    return (given.target / out.var(dim=1)).mean()  # guilty


@risky("division_by_zero")
def over_norm(out: Tensor, given: Given) -> Tensor:
    unit = out / out.norm(dim=1, keepdim=True)  # guilty
    return (unit @ unit.t()).mean()


@risky("division_by_zero")
def over_root(out: Tensor, given: Given) -> Tensor:
    return (out * torch.rsqrt(out.pow(2).sum(1, keepdim=True))).mean()  # guilty


@risky("division_by_zero")
def over_largest(out: Tensor, given: Given) -> Tensor:
    return (out / out.abs().amax(dim=1, keepdim=True)).mean()  # guilty


@risky("division_by_zero")
def between_extremes(out: Tensor, given: Given) -> Tensor:
    low, high = out.amin(1, keepdim=True), out.amax(1, keepdim=True)
    return ((out - low) / (high - low)).mean()  # guilty


@risky("division_by_zero")
def rational(out: Tensor, given: Given) -> Tensor:
    return (out[:, 0] / out[:, 1]).mean()  # guilty


@risky("division_by_zero")
def learned_temperature(out: Tensor, given: Given) -> Tensor:
    return functional.cross_entropy(out / given.temperature, given.labels)  # guilty


@risky("division_by_zero")
def percentage_error(out: Tensor, given: Given) -> Tensor:
    return ((out[:, 0] - given.target) / given.target).abs().mean()  # guilty


@risky("division_by_zero")
def mean_of_masked_rows(out: Tensor, given: Given) -> Tensor:
    mask = (given.x > 0.3).float()
    return ((out * mask).sum(1) / mask.sum(1)).pow(2).mean()  # guilty


@risky("division_by_zero")
def over_few_positives(out: Tensor, given: Given) -> Tensor:
    positive = given.labels[:4] > 7
    return (out[:4, 0] * positive).sum() / positive.sum()  # guilty


@risky("division_by_zero")
def reciprocal_behind_where(out: Tensor, given: Given) -> Tensor:
    return torch.where(out.abs() > 1e-3, 1 / out, out).mean()  # guilty


@risky("zero_scale_distribution")
def masked_categorical(out: Tensor, given: Given) -> Tensor:
    p = out.softmax(-1) * (given.x > 0).float()
    choice = Categorical(probs=p)  # guilty
    return -choice.log_prob(given.labels).mean()


@risky("zero_scale_distribution")
def normal_with_softplus(out: Tensor, given: Given) -> Tensor:
    spread = Normal(out[:, 0], functional.softplus(out[:, 1]))
    return -spread.log_prob(given.target).mean()  # guilty


@risky("softmax_all_masked")
def heavily_masked_attention(out: Tensor, given: Given) -> Tensor:
    scores = (out @ out.t()).masked_fill(torch.rand(32, 32) < 0.85, float("-inf"))
    return scores.softmax(-1).pow(2).mean()  # guilty


@risky("empty_reduction")
def mean_of_few_selected(out: Tensor, given: Given) -> Tensor:
    error = (out[:6, 0] - given.target[:6]).pow(2)
    return error[given.labels[:6] > 5].mean()  # guilty


@risky("degenerate_linalg")
def singular_vectors(out: Tensor, given: Given) -> Tensor:
    u, s, v = torch.linalg.svd(out, full_matrices=False)  # guilty
    return (u @ v).mean() + s.mean()


@safe
def cross_entropy(out: Tensor, given: Given) -> Tensor:
    return functional.cross_entropy(out, given.labels, label_smoothing=0.1)


@safe
def variational(out: Tensor, given: Given) -> Tensor:
    mean, log_var = out[:, :8], out[:, 8:].clamp(-8, 8)
    z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
    return (z**2).mean() + (log_var.exp() + mean**2 - log_var - 1).mean()


@safe
def root_mean_square_norm(out: Tensor, given: Given) -> Tensor:
    return (out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-6)).abs().mean()


@safe
def layer_norm_by_hand(out: Tensor, given: Given) -> Tensor:
    centred = out - out.mean(-1, keepdim=True)
    first = centred / (out.std(-1, keepdim=True) + 1e-5)
    second = centred / torch.sqrt(out.var(-1, keepdim=True) + 1e-5)
    return (first * second).pow(2).mean()


@safe
def contrastive(out: Tensor, given: Given) -> Tensor:
    a, b = functional.normalize(out), functional.normalize(given.other[given.labels])
    scores = given.log_scale.exp().clamp(max=100) * a @ b.t()
    return functional.cross_entropy(scores / 0.07, torch.arange(32))


@safe
def proximal_policy(out: Tensor, given: Given) -> Tensor:
    choice = Categorical(logits=out)
    log_p = choice.log_prob(given.labels)
    ratio = (log_p - log_p.detach()).exp()
    advantage = (given.target - given.target.mean()) / (given.target.std() + 1e-8)
    bounded = ratio.clamp(0.8, 1.2) * advantage
    return -torch.min(ratio * advantage, bounded).mean() - 0.01 * choice.entropy().mean()


@safe
def smooth_dice(out: Tensor, given: Given) -> Tensor:
    p, mask = torch.sigmoid(out), (given.x > 0).float()
    return 1 - ((2 * (p * mask).sum(1) + 1) / (p.sum(1) + mask.sum(1) + 1)).mean()


@safe
def focal(out: Tensor, given: Given) -> Tensor:
    mask = (given.x > 0).float()
    loss = functional.binary_cross_entropy_with_logits(out, mask, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


@safe
def clamped_cross_entropy(out: Tensor, given: Given) -> Tensor:
    p = torch.sigmoid(out[:, 0]).clamp(1e-6, 1 - 1e-6)
    return -(p.log() + (1 - p).log()).mean()


@safe
def entropy_from_logits(out: Tensor, given: Given) -> Tensor:
    log_p = out.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean()


@safe
def kl_of_torch(out: Tensor, given: Given) -> Tensor:
    q = given.other[given.labels].softmax(-1)
    return functional.kl_div(out.log_softmax(-1), q, reduction="batchmean")


@safe
def causal_attention(out: Tensor, given: Given) -> Tensor:
    future = torch.ones(32, 32).triu(1).bool()
    scores = (out @ out.t() / 4).masked_fill(future, float("-inf"))
    return (scores.softmax(-1) @ out).pow(2).mean()


@safe
def padded_attention(out: Tensor, given: Given) -> Tensor:
    padding = torch.arange(16)[None] >= given.labels.clamp_min(1)[:, None]
    return out.masked_fill(padding, float("-inf")).softmax(-1).pow(2).mean()


@safe
def attention_by_hand(out: Tensor, given: Given) -> Tensor:
    scores = out @ out.t() / 4
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return ((e / e.sum(-1, keepdim=True)) @ out).pow(2).mean()


@safe
def gaussian(out: Tensor, given: Given) -> Tensor:
    return functional.gaussian_nll_loss(
        out[:, 0], given.target, functional.softplus(out[:, 1]) + 1e-4
    )


@safe
def squashed_with_epsilon(out: Tensor, given: Given) -> Tensor:
    return torch.log(1 - torch.tanh(out).pow(2) + 1e-6).sum(-1).mean()


@safe
def graph_mean(out: Tensor, given: Given) -> Tensor:
    total = torch.zeros(16, 16).index_add(0, given.labels, out)
    count = torch.zeros(16).index_add(0, given.labels, torch.ones(32)).clamp(min=1)
    return (total / count[:, None]).pow(2).mean()


@safe
def mean_over_many(out: Tensor, given: Given) -> Tensor:
    mask = given.x > 0
    return (out.pow(2) * mask).sum() / mask.sum()


@safe
def mean_that_is_guarded(out: Tensor, given: Given) -> Tensor:
    mask = given.labels[:4] > 14
    if not mask.any():
        return out.sum() * 0
    return (out[:4].pow(2).sum(1) * mask).sum() / mask.sum()


@safe
def gradient_penalty(out: Tensor, given: Given) -> Tensor:
    x = given.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((x @ given.other).tanh().sum(), x, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean() + out.mean() * 0.01


@safe
def distance_with_epsilon(out: Tensor, given: Given) -> Tensor:
    return (((out[:, None] - out[None]) ** 2).sum(-1) + 1e-8).sqrt().mean()


@safe
def spread_regulariser(out: Tensor, given: Given) -> Tensor:
    return functional.relu(1 - torch.sqrt(out.var(dim=0) + 1e-4)).mean()


@safe
def where_before_the_log(out: Tensor, given: Given) -> Tensor:
    positive = torch.where(out > 0, out, torch.ones_like(out))
    return torch.where(out > 0, positive.log(), out).mean()


@safe
def noise_schedule(out: Tensor, given: Given) -> Tensor:
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 16), 0)[given.labels][:, None]
    return (kept.sqrt() * out + (1 - kept).sqrt() * torch.randn_like(out)).pow(2).mean()


@safe
def decorrelation(out: Tensor, given: Given) -> Tensor:
    z = (out - out.mean(0)) / (out.std(0) + 1e-6)
    return (z.t() @ z / 32 - torch.eye(16)).pow(2).sum()


@safe
def sinusoids(out: Tensor, given: Given) -> Tensor:
    rates = torch.exp(-torch.arange(8) * math.log(10000) / 8)
    angles = given.target[:, None] * rates
    return (out * torch.cat([angles.sin(), angles.cos()], 1)).mean()


@safe
def margin_softmax(out: Tensor, given: Given) -> Tensor:
    cosine = functional.linear(functional.normalize(out), functional.normalize(given.other))
    return functional.cross_entropy(
        30 * (cosine - 0.35 * functional.one_hot(given.labels, 16)), given.labels
    )


@safe
def triplet(out: Tensor, given: Given) -> Tensor:
    return functional.triplet_margin_loss(out[:10], out[10:20], out[20:30])
