"""The build of a model: deep stacks without normalisation, epsilons that half precision loses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from stayfinite.explain.causes import CAUSES
from stayfinite.prevent.risks import Risk

_DEEP = 20
_SMALL_EPS = 1e-7


def stack_risks(model: nn.Module) -> list[Risk]:
    """What is risky about how the model is built."""
    return [*_without_norm(model), *_small_eps(model)]


def _without_norm(model: nn.Module) -> Iterator[Risk]:
    modules = list(model.modules())
    layers = sum(isinstance(module, nn.Linear | _ConvNd) for module in modules)
    if layers >= _DEEP and not any(_is_norm(module) for module in modules):
        yield Risk(
            level="medium",
            cause="bad_init",
            what=f"{layers} layers follow one another without any normalisation; a gain that is "
            "a little off at each of them is far off at the end.",
            where=type(model).__name__,
            fix="Put a normalisation between them, `nn.LayerNorm(width)` or `nn.BatchNorm2d(c)`, "
            "or residual connections that begin at 0.",
            evidence={"layers": layers},
        )


def _small_eps(model: nn.Module) -> Iterator[Risk]:
    for name, module in model.named_modules():
        eps: Any = getattr(module, "eps", None)
        dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
        if _is_norm(module) and torch.float16 in dtypes and _is_lost(eps):
            yield Risk(
                level="low",
                cause="low_precision_underflow",
                what=f"eps={eps:g} is 0 in float16; where the variance is 0 too, only a kernel "
                "that computes in float32 is saved by it.",
                where=name or type(model).__name__,
                fix=CAUSES["low_precision_underflow"].fix,
                evidence={"eps": eps},
            )


def _is_lost(eps: object) -> bool:
    return isinstance(eps, float) and 0 <= eps < _SMALL_EPS


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__
