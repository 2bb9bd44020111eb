"""Small bugs, traced for real: the first patch cures them and leaves healthy values as they were.

Each snippet has a function `run(bad)`, which returns tensors: finite ones unless it is called with
True. It is run under the tracer, patched, and run again.
"""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stayfinite
from stayfinite.patch.candidates import patches_for
from stayfinite.patch.edit import Patch
from stayfinite.records import Incident

HEAD = "import math\n\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
GRADIENT = """

def gradient(loss, *inputs):
    return [loss, *torch.autograd.grad(loss, inputs)]
"""
SNIPPETS: dict[str, tuple[str, str]] = {}


def snippet(name: str, expected: str, body: str) -> None:
    SNIPPETS[name] = (HEAD + GRADIENT + "\n\n" + textwrap.dedent(body).strip() + "\n", expected)


snippet(
    "softmax focal loss",
    "x.log_softmax(dim=1)",
    """
    def run(bad):
        x = torch.tensor([[200.0 if bad else 2.0, 0.0, 1.0]], requires_grad=True)
        p = x.softmax(dim=1)
        loss = -((1 - p) ** 2 * torch.log(p)).sum()
        return gradient(loss, x)
    """,
)
snippet(
    "length of a gradient that is 0",
    "(gx.pow(2) + gy.pow(2) + 1e-12).sqrt()",
    """
    def run(bad):
        gx = torch.tensor([0.0 if bad else 1.0, 2.0], requires_grad=True)
        gy = torch.tensor([0.0, 1.0])
        return gradient(torch.hypot(gx, gy).sum(), gx)
    """,
)
snippet(
    "nothing added to nothing in log space",
    "torch.logaddexp(a.clamp_min(-1e30), b.clamp_min(-1e30))",
    """
    def run(bad):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        shift = torch.tensor([float("-inf") if bad else 0.5, 0.0])
        a, b = x + shift, 2 * x + shift
        total = torch.logaddexp(a, b)
        return gradient(total.clamp_min(-1e4).sum(), x)
    """,
)
snippet(
    "determinant below 0",
    "torch.linalg.slogdet(m)[1]",
    """
    def run(bad):
        m = torch.tensor([[1.0, 0.0], [0.0, -1.0 if bad else 1.0]], requires_grad=True)
        return gradient(torch.logdet(m), m)
    """,
)
snippet(
    "axes of limbs of which one is masked",
    "(limbs * seen) + 1e-6 * torch.eye(*(limbs * seen).shape[-2:]).to(limbs * seen)",
    """
    def run(bad):
        limbs = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.5, 2.0]], requires_grad=True)
        seen = torch.tensor([1.0, 0.0 if bad else 1.0])
        q, r = torch.linalg.qr(limbs * seen)
        return gradient(q[:, 0].sum() + r.sum(), limbs)
    """,
)
snippet(
    "weights by frequency",
    "(4 * count).clamp_min(1)",
    """
    def run(bad):
        mask = torch.tensor([0, 1, 2, 2 if bad else 3])
        count = torch.bincount(mask, minlength=4).float()
        return [count.sum() / (4 * count)]
    """,
)
snippet(
    "two-sided cross entropy of a sigmoid",
    "F.binary_cross_entropy_with_logits(x, y)",
    """
    def run(bad):
        x = torch.tensor([60.0 if bad else 1.0, -0.5], requires_grad=True)
        y = torch.tensor([0.0, 1.0])
        p = torch.sigmoid(x)
        loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
        return gradient(loss, x)
    """,
)
snippet(
    "info-nce by hand",
    "torch.logsumexp(",
    """
    def run(bad):
        a = torch.eye(3) * (30.0 if bad else 1.0)
        a.requires_grad_()
        scores = a @ a.T
        total = torch.exp(scores).sum(dim=1)
        loss = (torch.log(total) - scores.diagonal()).mean()
        return gradient(loss, a)
    """,
)
snippet(
    "sigmoid by hand",
    "torch.sigmoid(",
    """
    def gate(x):
        e = torch.exp(x)
        return e / (1 + e)


    def run(bad):
        x = torch.tensor([100.0 if bad else 1.0, -1.0], requires_grad=True)
        return gradient(gate(x).sum(), x)
    """,
)
snippet(
    "softmax by hand",
    "torch.softmax(",
    """
    def attend(x):
        weights = torch.exp(x)
        return weights / weights.sum(dim=-1, keepdim=True)


    def run(bad):
        x = torch.tensor([[100.0 if bad else 1.0, -1.0]], requires_grad=True)
        return gradient(attend(x)[0, 0], x)
    """,
)
snippet(
    "log1p of exp",
    "F.softplus(",
    """
    def run(bad):
        x = torch.tensor([100.0 if bad else 1.0, -1.0], requires_grad=True)
        return gradient(torch.log1p(torch.exp(x)).sum(), x)
    """,
)
snippet(
    "distance of equal points",
    ".clamp_min(",
    """
    def run(bad):
        a = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
        b = torch.tensor([[1.0, 2.0 if bad else 1.0], [0.0, 0.0]])
        loss = ((a - b) ** 2).sum(dim=1).sqrt().mean()
        return gradient(loss, a)
    """,
)
snippet(
    "weighted mean without weight",
    ".clamp_min(1)",
    """
    def run(bad):
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        mask = torch.zeros(3) if bad else torch.tensor([1.0, 0.0, 1.0])
        loss = (x * mask).sum() / mask.sum()
        return gradient(loss, x)
    """,
)
snippet(
    "selected mean of nothing",
    "max(x[keep].numel(), 1)",
    """
    def run(bad):
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        keep = x.detach() > (5 if bad else 1.5)
        loss = x[keep].mean() + x.sum()
        return gradient(loss, x)
    """,
)
snippet(
    "loss of no boxes",
    'reduction="sum"',
    """
    def run(bad):
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        keep = x.detach() > (5 if bad else 1.5)
        loss = F.smooth_l1_loss(x[keep], torch.zeros(3)[keep]) + x.sum()
        return gradient(loss, x)
    """,
)
snippet(
    "labels that are all ignored",
    ".sum().clamp_min(1)",
    """
    def run(bad):
        x = torch.tensor([[1.0, 2.0], [0.0, 1.0]], requires_grad=True)
        y = torch.tensor([-1, -1]) if bad else torch.tensor([0, -1])
        loss = F.cross_entropy(x, y, ignore_index=-1)
        return gradient(loss, x)
    """,
)
snippet(
    "attention without keys",
    "torch.finfo(scores.dtype).min",
    """
    def run(bad):
        scores = torch.tensor([[1.0, 2.0], [0.5, 0.1]], requires_grad=True)
        mask = torch.tensor([[True, bad], [False, False]])
        weights = F.softmax(scores.masked_fill(mask, -math.inf), dim=-1)
        loss = (weights * torch.tensor([1.0, 3.0])).sum()
        return gradient(loss, scores)
    """,
)
snippet(
    "scores that are set",
    "scores[mask] = torch.finfo(scores.dtype).min",
    """
    def run(bad):
        x = torch.tensor([[1.0, 2.0], [0.5, 0.1]], requires_grad=True)
        mask = torch.tensor([[True, bad], [False, False]])
        scores = x / 2
        scores[mask] = -torch.inf
        weights = scores.softmax(dim=1)
        return gradient((weights * torch.tensor([1.0, 3.0])).sum(), x)
    """,
)
snippet(
    "additive mask",
    ".clamp_min(torch.finfo(",
    """
    def run(bad):
        scores = torch.tensor([[1.0, 2.0], [0.5, 0.1]], requires_grad=True)
        bias = torch.tensor([[-math.inf, -math.inf if bad else 0.0], [0.0, 0.0]])
        weights = (scores + bias).softmax(-1)
        return gradient((weights * torch.tensor([1.0, 3.0])).sum(), scores)
    """,
)
snippet(
    "branch that is not taken",
    "torch.where(x > 0, x, 1.0)",
    """
    def run(bad):
        x = torch.tensor([0.0 if bad else 1.0, 4.0], requires_grad=True)
        y = torch.where(x > 0, torch.sqrt(x), x)
        return gradient(y.sum(), x)
    """,
)
snippet(
    "branch of a name",
    "torch.where(near, 1.0, r)",
    """
    def run(bad):
        r = torch.tensor([0.0 if bad else 1.0, 4.0], requires_grad=True)
        near = r < 1e-3
        ratio = torch.sin(r) / r
        y = torch.where(near, 1 - r, ratio)
        return gradient(y.sum(), r)
    """,
)
snippet(
    "masked logarithm",
    "torch.where(empty, 1.0, x)",
    """
    def run(bad):
        x = torch.tensor([0.0 if bad else 1.0, 4.0], requires_grad=True)
        empty = x == 0
        y = torch.log(x).masked_fill(empty, 0.0)
        return gradient(y.sum(), x)
    """,
)
snippet(
    "norm of a gradient",
    ".pow(2).sum(dim=-1)",
    """
    def run(bad):
        w = torch.tensor([[0.0, 0.0], [1.0, 2.0]]) if bad else torch.ones(2, 2)
        w.requires_grad_()
        size = torch.norm(w, dim=-1)
        (first,) = torch.autograd.grad(size.sum(), w, create_graph=True)
        return gradient(first.pow(2).sum(), w)
    """,
)
snippet(
    "direction of nothing",
    "eps=1e-6",
    """
    def run(bad):
        x = torch.tensor([[0.0, 0.0 if bad else 1.0], [3.0, 4.0]], requires_grad=True)
        unit = x / x.norm(dim=1, keepdim=True)
        return gradient(unit.sum(), x)
    """,
)
snippet(
    "angle between equal vectors",
    ".clamp(-1 + 1e-6, 1 - 1e-6)",
    """
    def run(bad):
        a = torch.tensor([1.0, 0.0], requires_grad=True)
        b = torch.tensor([1.0, 0.0]) if bad else torch.tensor([0.6, 0.8])
        angle = (a * b).sum().acos()
        return gradient(angle, a)
    """,
)
snippet(
    "gamma of a negative",
    ".sign() * x.abs() ** gamma",
    """
    def run(bad):
        x = torch.tensor([-0.5 if bad else 0.5, 0.25], requires_grad=True)
        gamma = 0.4
        return gradient((x ** gamma).sum(), x)
    """,
)
snippet(
    "gamma of a negative beside a 0",
    ".sign() * x.abs().clamp_min(1e-8) ** gamma",
    """
    def run(bad):
        x = torch.tensor([-0.5 if bad else 0.5, 0.0 if bad else 0.25], requires_grad=True)
        gamma = 0.4
        return gradient((x ** gamma).sum(), x)
    """,
)
snippet(
    "root by a power",
    ".clamp_min(1e-8)",
    """
    def run(bad):
        x = torch.tensor([0.0 if bad else 0.5, 0.25], requires_grad=True)
        return gradient(x.pow(0.5).sum(), x)
    """,
)
snippet(
    "spread of one",
    "correction=0",
    """
    def run(bad):
        x = torch.tensor([1.0]) if bad else torch.tensor([1.0, -1.0] * 500)
        return [x / (x.std() + 1e-8)]
    """,
)
snippet(
    "unbiased by name",
    "unbiased=False",
    """
    def run(bad):
        x = torch.tensor([[1.0]]) if bad else torch.tensor([[1.0], [-1.0]] * 500)
        return [x * torch.var(x, dim=0, unbiased=True)]
    """,
)
snippet(
    "entropy of a certain choice",
    ".clamp_min(1e-8)",
    """
    def run(bad):
        p = torch.tensor([0.0 if bad else 0.5, 0.5], requires_grad=True)
        return gradient(-(p * p.log()).sum(), p)
    """,
)
snippet(
    "zero times infinity",
    "-1e9",
    """
    def run(bad):
        mask = torch.tensor([0.0 if bad else 1.0, 1.0])
        x = torch.tensor([[0.2, 0.4]], requires_grad=True)
        scores = torch.cat([x + mask * -math.inf, torch.ones(1, 1)], dim=1)
        return gradient(scores.softmax(-1)[0, 2], x)
    """,
)
snippet(
    "scale of a distribution",
    "std.clamp_min(1e-4)",
    """
    def run(bad):
        x = torch.tensor([1.0, -200.0 if bad else 0.5], requires_grad=True)
        std = x.exp()
        dist = torch.distributions.Normal(torch.zeros(2), std, validate_args=False)
        return gradient(-dist.log_prob(torch.ones(2)).mean(), x)
    """,
)
snippet(
    "reciprocal of a difference",
    "torch.where(gap.abs() < 1e-6, 1e-6, gap)",
    """
    def run(bad):
        x = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
        gap = x - torch.tensor([1.0 if bad else 0.5, 3.0, 4.0])
        return gradient((1.0 / gap).sum(), x)
    """,
)
snippet(
    "division in place",
    ".clamp_min(",
    """
    def run(bad):
        x = torch.tensor([[0.0, 0.0], [3.0, 4.0]]) if bad else torch.ones(2, 2)
        x /= x.sum(dim=1, keepdim=True)
        return [x]
    """,
)
snippet(
    "expression on several lines",
    ").clamp_min(1e-8)",
    """
    def run(bad):
        a = torch.tensor([0.0 if bad else 1.0, 2.0], requires_grad=True)
        loss = torch.log(
            a * 2
            + a * 3  # weights
        ).sum()
        return gradient(loss, a)
    """,
)
snippet(
    "half precision with an eps that is 0",
    "1e-4",
    """
    def run(bad):
        x = torch.tensor([0.0 if bad else 1.0, 2.0], dtype=torch.float16)
        return [x / (x + 1e-8)]
    """,
)
snippet(
    "squares in half precision",
    ".float()",
    """
    def run(bad):
        x = torch.tensor([300.0 if bad else 3.0, 2.0], dtype=torch.float16, requires_grad=True)
        energy = (x * x).float().sum() / 1e6
        return gradient(energy, x)
    """,
)
snippet(
    "angle at the origin",
    "torch.ones_like(",
    """
    def run(bad):
        y = torch.tensor([1e-20 if bad else 1.0], requires_grad=True)
        x = torch.tensor([1e-20 if bad else 1.0], requires_grad=True)
        return gradient(torch.atan2(y, x).sum(), y, x)
    """,
)
snippet(
    "inverse of a singular matrix",
    "torch.eye(",
    """
    def run(bad):
        a = torch.zeros(2, 2) if bad else 1e3 * torch.eye(2)
        return [torch.linalg.inv_ex(a)[0]]
    """,
)


snippet(
    "softmax as a module",
    "nn.LogSoftmax(dim=1)(x)",
    """
    def run(bad):
        x = torch.tensor([[200.0 if bad else 2.0, 0.0, 1.0]], requires_grad=True)
        loss = -torch.log(nn.Softmax(dim=1)(x))[0, 1]
        return gradient(loss, x)
    """,
)
snippet(
    "mean of importance weights",
    "- math.log(",
    """
    def run(bad):
        x = torch.tensor([[200.0 if bad else 2.0, 0.0, 1.0]], requires_grad=True)
        bound = torch.exp(x).mean(dim=1).log().sum()
        return gradient(bound, x)
    """,
)
snippet(
    "mask constant of the module",
    "MASKED = -1e4",
    """
    MASKED = -1e9


    def run(bad):
        x = torch.tensor([[0.5, 0.25]], dtype=torch.float16)
        keep = torch.tensor([[0.0, 0.0 if bad else 1.0]], dtype=torch.float16)
        return [(x + (1 - keep) * MASKED).softmax(-1)]
    """,
)
snippet(
    "spread by position",
    "torch.std(x, 0, False)",
    """
    def run(bad):
        x = torch.tensor([[1.0]]) if bad else torch.tensor([[1.0], [-1.0]] * 500)
        return [x / (torch.std(x, 0, True) + 1e-6)]
    """,
)
snippet(
    "a choice without probabilities",
    "probs=p.clamp_min(1e-6)",
    """
    def run(bad):
        p = torch.tensor([[0.0, 0.0], [1.0, 1.0]]) if bad else torch.ones(2, 2)
        p.requires_grad_()
        dist = torch.distributions.Categorical(probs=p, validate_args=False)
        return gradient(dist.log_prob(torch.tensor([0, 1])).sum(), p)
    """,
)
snippet(
    "criterion with ignored labels",
    "if (y != 0).any() else",
    """
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.criterion = nn.CrossEntropyLoss(ignore_index=0)

        def forward(self, x, y):
            return self.criterion(x, y)


    def run(bad):
        x = torch.tensor([[1.0, 2.0], [0.0, 1.0]], requires_grad=True)
        y = torch.tensor([0, 0]) if bad else torch.tensor([0, 1])
        return gradient(Head()(x, y), x)
    """,
)
snippet(
    "logit by hand",
    "torch.log(x.clamp_min(1e-8) / (1 - x).clamp_min(1e-8))",
    """
    def run(bad):
        x = torch.tensor([0.25, 1.0 if bad else 0.5], requires_grad=True)
        return gradient(torch.log(x / (1 - x)).sum(), x)
    """,
)
snippet(
    "probability that rounds to one",
    "1 - 1e-6",
    """
    def run(bad):
        x = torch.tensor([0.25, 1.0 if bad else 0.5], requires_grad=True)
        p = x.clamp(1e-8, 1 - 1e-8)
        return gradient(torch.log(1 - p).sum(), x)
    """,
)
snippet(
    "two logarithms of a discriminator",
    "torch.log((1 - fake).clamp_min(1e-8))",
    """
    def run(bad):
        real = torch.tensor([1.0, 0.5], requires_grad=True)
        fake = torch.tensor([0.5, 1.0 if bad else 0.5], requires_grad=True)
        loss = -(torch.log(real) + torch.log(1 - fake)).mean()
        return gradient(loss, real, fake)
    """,
)
snippet(
    "constant feature",
    "x.std(0).clamp_min(1e-6)",
    """
    def run(bad):
        x = torch.tensor([[1.0, 2.0], [1.0 if bad else 3.0, 4.0]], requires_grad=True)
        return gradient(((x - x.mean(0)) / x.std(0)).pow(2).sum(), x)
    """,
)
snippet(
    "scores in half precision",
    "(q / math.sqrt(4)) @ ",
    """
    def run(bad):
        q = torch.full((1, 4), 160.0 if bad else 1.0, dtype=torch.float16)
        return [(q @ q.T) / math.sqrt(4)]
    """,
)
snippet(
    "count of python",
    "max(count, 1)",
    """
    def run(bad):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        count = 0 if bad else 2
        return gradient(x.sum() / count, x)
    """,
)


snippet(
    "weights that are normalised later",
    "x - x.amax(dim=-1, keepdim=True)",
    """
    def run(bad):
        x = torch.tensor([[100.0 if bad else 1.0, 0.0, 2.0]], requires_grad=True)
        keep = torch.tensor([1.0, 1.0, 0.0])
        e = torch.exp(x) * keep
        loss = (e / e.sum(dim=-1, keepdim=True))[0, 1]
        return gradient(loss, x)
    """,
)
snippet(
    "denominator that is used twice",
    "n = mask.sum(1, keepdim=True).clamp_min(1)",
    """
    def run(bad):
        x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
        mask = torch.tensor([[0.0, 0.0 if bad else 1.0], [1.0, 1.0]])
        n = mask.sum(1, keepdim=True)
        mean = (x * mask).sum(1, keepdim=True) / n
        var = ((x - mean) ** 2 * mask).sum(1, keepdim=True) / n
        return gradient((var + mean).sum(), x)
    """,
)
snippet(
    "keys that are all padding",
    "(ids == 0) & ~(ids == 0).all(dim=-1, keepdim=True)",
    """
    def run(bad):
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(4, 2, batch_first=True)
        x = torch.randn(2, 3, 4, requires_grad=True)
        ids = torch.tensor([[1, 2, 0], [0 if bad else 1, 0, 0]])
        y, _ = attention(x, x, x, key_padding_mask=ids == 0)
        return gradient(y.sum(), x)
    """,
)
snippet(
    "mean of nothing inside a quotient",
    "1.0 / (x[keep].sum() / max(x[keep].numel(), 1) + 1)",
    """
    def run(bad):
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        keep = x.detach() > (5 if bad else 1.5)
        loss = 1.0 / (x[keep].mean() + 1)
        return gradient(loss, x)
    """,
)


snippet(
    "inverse hyperbolic cosine at its edge",
    ".clamp_min(1 + 1e-6)",
    """
    def run(bad):
        x = torch.tensor([0.0 if bad else 2.0], requires_grad=True)
        return gradient(torch.acosh(1 + 2 * x / (1 - x.detach() ** 2 / 9)).sum(), x)
    """,
)


def call(text: str, path: Path, bad: bool) -> list[Tensor]:
    """What the text's `run(bad)` returns."""
    scope: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(text, str(path), "exec"), scope)
    torch.manual_seed(0)
    return list(scope["run"](bad))


def is_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def incident_of(text: str, path: Path) -> Incident:
    path.write_text(text, encoding="utf-8")
    linecache.checkcache(str(path))
    with stayfinite.trace(raise_on_nan=False) as traced:
        result = call(text, path, True)  # noqa: F841  (a variable at the end of the block)
    return traced.incidents[0]


def patches(text: str, folder: Path) -> list[Patch]:
    incident = incident_of(text, folder / "train.py")
    return patches_for(incident, folder=str(folder), files=[str(folder / "train.py")])


snippet(
    "two-sided cross entropy of probabilities",
    "F.binary_cross_entropy(p, y)",
    """
    def run(bad):
        p = torch.tensor([1.0 if bad else 0.7, 0.4], requires_grad=True)
        y = torch.tensor([0.0, 1.0])
        loss = -torch.mean(y * torch.log(p) + (1 - y) * torch.log(1 - p))
        return gradient(loss, p)
    """,
)
snippet(
    "two-sided cross entropy, each element",
    'F.binary_cross_entropy(p, y, reduction="none")',
    """
    def run(bad):
        p = torch.tensor([1.0 if bad else 0.7, 0.4], requires_grad=True)
        y = torch.tensor([0.0, 1.0])
        each = -y * p.log() - (1 - y) * (1 - p).log()
        return gradient(each.sum(), p)
    """,
)
snippet(
    "logarithms of both sides",
    "torch.log(a.clamp_min(1e-8)) - torch.log(b.clamp_min(1e-8))",
    """
    def run(bad):
        a = torch.tensor([0.0 if bad else 1.0, 2.0], requires_grad=True)
        b = torch.tensor([3.0, 2.0])
        ratio = torch.log(a) - torch.log(b)
        return gradient(ratio.sum(), a)
    """,
)
snippet(
    "ratios of both boxes",
    "torch.atan(w_t / h_t.clamp_min(1e-6)) - torch.atan(w_p / h_p.clamp_min(1e-6))",
    """
    def run(bad):
        w_t, h_t = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        w_p = torch.tensor([1.0, 3.0], requires_grad=True)
        h_p = torch.tensor([0.0 if bad else 1.0, 2.0])
        loss = (torch.atan(w_t / h_t) - torch.atan(w_p / h_p)).pow(2).sum()
        return gradient(loss, w_p)
    """,
)
snippet(
    "cosine of two vectors that are divided by their norms",
    "(F.normalize(a, dim=-1, eps=1e-6) * F.normalize(b, dim=-1, eps=1e-6)).sum(-1)",
    """
    def run(bad):
        a = torch.tensor([[0.0 if bad else 1.0, 0.0], [1.0, 2.0]])
        b = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
        cosine = (a / a.norm(dim=-1, keepdim=True) * (b / b.norm(dim=-1, keepdim=True))).sum(-1)
        return [cosine]
    """,
)
snippet(
    "vectors divided by a norm that is written out",
    "F.normalize(a, dim=1, eps=1e-6)",
    """
    def run(bad):
        a = torch.tensor([[0.0 if bad else 1.0, 0.0], [1.0, 2.0]])
        return [a / torch.sqrt((a ** 2).sum(1, keepdim=True))]
    """,
)


def test_later_patches_guard_a_name_for_all_its_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = HEAD + textwrap.dedent(
        """
        def nll(y, mu, sigma):
            return (0.5 * ((y - mu) / sigma) ** 2 + torch.log(sigma)).mean()


        def run(bad):
            return [nll(torch.ones(2), torch.zeros(2), torch.tensor([1.0, 0.0 if bad else 2.0]))]
        """
    )
    found = patches(text, tmp_path)
    cured = [p for p in found if is_finite(call(p.after, tmp_path / "patched.py", True))]
    assert "    sigma = sigma.clamp_min(1e-6)\n    return" in cured[0].after


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", SNIPPETS)
def test_first_patch_cures_and_keeps_the_meaning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, expected = SNIPPETS[name]
    assert not is_finite(call(text, tmp_path / "train.py", True))
    found = patches(text, tmp_path)
    first = found[0]
    assert expected in first.after, first.diff(folder=str(tmp_path))
    cured = call(first.after, tmp_path / "patched.py", True)
    assert is_finite(cured), first.diff(folder=str(tmp_path))
    before = call(text, tmp_path / "train.py", False)
    after = call(first.after, tmp_path / "patched.py", False)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=2e-3, atol=1e-5, check_dtype=False)
    check_each_is_another_change(found, text)


def check_each_is_another_change(found: list[Patch], text: str) -> None:
    assert len({patch.after for patch in found}) == len(found) <= 6
    for patch in found:
        compile(patch.after, "patched.py", "exec")
        assert patch.before == text != patch.after
        assert "nan_to_num" not in patch.after


HIDDEN = {
    "a variance by a difference": (
        """
        def run(bad):
            x = torch.tensor([1e4, 1e4 + 1e-3 if bad else 2e4])
            return [torch.sqrt((x ** 2).mean() - x.mean() ** 2 - (40.0 if bad else 0.0))]
        """,
        "the formula should",
    ),
    "a logarithm of a negative number": (
        """
        def run(bad):
            gain = torch.tensor([-0.5 if bad else 0.5, 1.0])
            return [torch.log(gain)]
        """,
        "This hides that the argument is negative, down to -0.5; the formula should",
    ),
    "a cosine that is none": (
        """
        def run(bad):
            dot = torch.tensor([7.0 if bad else 0.5])
            return [torch.acos(dot)]
        """,
        "This hides that the argument reaches 7; the formula should give a cosine",
    ),
    "an exponent without bound": (
        """
        def run(bad):
            score = torch.tensor([900.0 if bad else 1.0])
            return [torch.exp(score)]
        """,
        "This hides that the exponent reaches 900; the formula should",
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_change_that_only_hides_a_wrong_formula_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    body, said = HIDDEN[name]
    text = HEAD + GRADIENT + "\n\n" + textwrap.dedent(body).strip() + "\n"
    found = patches(text, tmp_path)
    assert any(said in patch.what for patch in found), [patch.what for patch in found]


def test_a_clamp_of_what_is_0_by_rounding_is_not_called_hiding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    body = """
    def run(bad):
        p = torch.tensor([0.0 if bad else 0.5, 1.0])
        return [torch.log(p)]
    """
    text = HEAD + GRADIENT + "\n\n" + textwrap.dedent(body).strip() + "\n"
    assert not any("hides" in patch.what for patch in patches(text, tmp_path))
