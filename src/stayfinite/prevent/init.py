"""First weights: a quiet head, and a look at weights that will not train as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from stayfinite.errors import ConfigError, InputError

Kind = Literal[
    "non_finite", "uninitialised", "too_large", "near_zero", "zero", "constant", "dead_units"
]

# A weight multiplies the size of its input by about rms * sqrt(fan_in): 0.6 for torch's defaults,
# 1.4 for He's. Ten such layers at 10 overflow float16.
_LARGEST_GAIN = 10.0
_LARGEST_SINGLE_GAIN = 100.0
_SMALLEST_GAIN = 1e-4
# For what has no fan-in; embeddings are N(0, 1).
_LARGEST = 1e4
# Memory that was never written reads as pointers and text, much of which is subnormal.
_SUBNORMAL_PART = 0.01

_Weighted = nn.Linear | _ConvNd | nn.Bilinear
_Recurrent = nn.RNNBase | nn.RNNCellBase


@dataclass(frozen=True, kw_only=True)
class InitProblem:
    """One thing that is wrong with one tensor of a model: what is seen, and what to do.

    >>> print(InitProblem(name="weight", kind="zero", detail="is 0 everywhere", fix="Draw it."))
    weight: is 0 everywhere. Draw it.
    """

    name: str
    kind: Kind
    detail: str
    fix: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}. {self.fix}"


def init_head(module: nn.Module, std: float = 0.01, *, prior: float | None = None) -> nn.Module:
    """Small normal weights and zero biases for all linear layers and convolutions of the module.

    A head that starts near 0 gives a first loss near log(classes) instead of one that its noise
    decides. `prior`, a probability, is what a sigmoid says at first: the bias of the last layer
    becomes its logit, so that a million easy negatives do not drown the first steps. Gives back
    the module.

    >>> head = init_head(nn.Linear(8, 3), prior=0.01)
    >>> round(head.bias[0].item(), 3)
    -4.595
    """
    if not 0 < std < math.inf:
        raise ConfigError(f"std is {std}; it must be greater than 0 and finite.")
    if prior is not None and not 0 < prior < 1:
        raise ConfigError(f"prior is {prior}; it must be a probability between 0 and 1.")
    layers = [each for each in module.modules() if isinstance(each, _Weighted)]
    if not layers:
        raise InputError(
            f"{type(module).__name__} has no linear layer or convolution; "
            "give the part of the model that makes its predictions."
        )
    for layer in layers:
        nn.init.normal_(layer.weight, std=std)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    if prior is not None and layers[-1].bias is not None:
        nn.init.constant_(layers[-1].bias, math.log(prior / (1 - prior)))
    return module


@torch.no_grad()
def check_init(model: nn.Module) -> list[InitProblem]:
    """Every problem with the weights of a model that has not been trained yet.

    Looks for NaN and Inf, memory that was never written, weights too large or too small for their
    fan-in, layers of zeros, and units that are all alike or dead. Torch's own modules have none of
    these as they are built. One host read for each tensor.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    >>> check_init(model)
    []
    >>> _ = nn.init.normal_(model[2].weight, std=5.0)
    >>> [(problem.name, problem.kind) for problem in check_init(model)]
    [('2.weight', 'too_large')]
    """
    return [
        InitProblem(name=name, kind=kind, detail=detail, fix=_FIXES[kind])
        for name, module, tensor in _tensors(model)
        for kind, detail in _problems(name.rpartition(".")[2], module, tensor)
    ]


_FIXES: dict[Kind, str] = {
    "non_finite": "Find what wrote it: an initialisation, a loaded file, or a division.",
    "uninitialised": "It looks like memory that was never written; fill what torch.empty made, "
    "for example with nn.init.kaiming_uniform_(weight, a=5 ** 0.5).",
    "too_large": "Scale it by its fan-in, nn.init.kaiming_uniform_(weight, a=5 ** 0.5), or for a "
    "head use stayfinite.init_head(head).",
    "near_zero": "Hardly anything gets through; scale it by its fan-in, "
    "nn.init.kaiming_uniform_(weight, a=5 ** 0.5).",
    "zero": "Nothing gets through, nor back; meant so at the end of a residual branch, otherwise "
    "use nn.init.kaiming_uniform_(weight, a=5 ** 0.5).",
    "constant": "All units compute and learn the same; draw it at random, "
    "nn.init.kaiming_uniform_(weight, a=5 ** 0.5).",
    "dead_units": "They give only their bias, and normalising them divides by 0; draw them again "
    "or remove them.",
}


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Each floating parameter and buffer that has values, once, with its owner."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or id(tensor) in seen or is_lazy(tensor) or tensor.is_meta:
                continue
            if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel():
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, module, tensor


def _problems(name: str, module: nn.Module, tensor: Tensor) -> Iterator[tuple[Kind, str]]:
    """What is wrong with one tensor; what would only follow from it is not said."""
    if not isinstance(tensor, nn.Parameter):
        nans = int(tensor.isnan().sum())  # an Inf in a buffer may be a mask
        if nans:
            yield "non_finite", f"{nans} of {tensor.numel()} values are NaN"
        return
    bad = int((~tensor.isfinite()).sum())
    if bad:
        yield "non_finite", f"{bad} of {tensor.numel()} values are NaN or Inf"
        return
    values = tensor.detach().float() if tensor.dtype != torch.float64 else tensor.detach()
    size, largest, subnormal = values.abs(), float(values.abs().max()), 0.0
    if tensor.dtype != torch.float16:  # where small weights are subnormal
        is_subnormal = (size > 0) & (size < torch.finfo(tensor.dtype).tiny)
        subnormal = float(is_subnormal.double().mean())
    fan_in = _fan_in(name, module, tensor)
    if subnormal > _SUBNORMAL_PART:
        yield "uninitialised", f"{subnormal:.0%} of the values are subnormal, such as 1e-40"
    elif largest > _LARGEST:
        yield "too_large", f"its largest value is {largest:.3g}"
    elif fan_in is not None and tensor.requires_grad:
        yield from _weight_problems(values, largest, fan_in, module)


def _weight_problems(
    values: Tensor, largest: float, fan_in: int, module: nn.Module
) -> Iterator[tuple[Kind, str]]:
    norm = torch.linalg.vector_norm(values, dtype=torch.float64)
    rms = float(norm) / math.sqrt(values.numel())
    gain, largest_gain = rms * math.sqrt(fan_in), largest * math.sqrt(fan_in)
    sizes = (
        f"std {rms:.3g} and largest {largest:.3g} for a fan-in of {fan_in}: "
        f"what comes in is multiplied by about {gain:.3g}"
    )
    # The weights of each unit that the layer gives out.
    is_transposed = isinstance(module, _ConvTransposeNd) and module.groups == 1
    units = (values.transpose(0, 1) if is_transposed else values).flatten(1)
    is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)  # a row for padding is 0
    if largest == 0:
        yield "zero", "all weights are 0"
    elif len(units) > 1 and bool((units == units[:1]).all()):
        yield "constant", "the weights of all units are the same"
    elif gain > _LARGEST_GAIN or largest_gain > _LARGEST_SINGLE_GAIN:
        yield "too_large", sizes
    elif gain < _SMALLEST_GAIN:
        yield "near_zero", sizes
    elif not is_embedding and (dead := int((units == 0).all(-1).sum())):
        yield "dead_units", f"of {len(units)} units, {dead} have only weights of 0"


def _fan_in(name: str, module: nn.Module, tensor: Tensor) -> int | None:
    """How many inputs a unit adds up, as torch's initialisation counts; None for no weight."""
    if "weight" not in name or tensor.ndim < 2:
        return None
    if isinstance(module, nn.Bilinear):
        return tensor.shape[1]
    if isinstance(module, _Recurrent):
        return module.hidden_size
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 1
    if isinstance(module, _Weighted | nn.MultiheadAttention):
        return tensor[0].numel()
    return None
