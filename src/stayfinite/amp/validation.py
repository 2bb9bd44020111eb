"""What is wrong before the first step: all of it at once."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer

from stayfinite.amp.config import AMPConfig
from stayfinite.detect.reports import bad_reports
from stayfinite.detect.walk import named_states, named_weights
from stayfinite.errors import InputError, TrainingSetupError
from stayfinite.records import NaNReport, NaNType

logger = logging.getLogger("stayfinite")
_MOST_NAMED = 5


def require_kinds(config: Any, model: Any, optimizer: Any) -> None:
    """InputError for the first that is of another kind."""
    kinds = {"config": AMPConfig, "model": nn.Module, "optimizer": Optimizer}
    for (name, kind), value in zip(kinds.items(), (config, model, optimizer), strict=True):
        if not isinstance(value, kind):
            raise InputError(f"{name} is a {type(value).__name__}; it must be a {kind.__name__}.")


def require_ready(model: nn.Module, optimizer: Optimizer, *, has_scheduler: bool = False) -> None:
    """TrainingSetupError with all that no recovery could mend; what is only odd is logged.

    The first batch is not looked at: a bad one is recovered from as any other.
    """
    problems = [
        *_said(bad_weights(model), "is in the model", "Load a good checkpoint, or initialise it."),
        *_said(bad_states(optimizer), "is in the optimizer", "Load a good one, or make it anew."),
        *_parameter_problems(model, optimizer),
        *_rate_problems(optimizer, may_be_zero=has_scheduler),
    ]
    if problems:
        raise TrainingSetupError(problems)
    for oddity in _oddities(model, optimizer):
        logger.warning(oddity)


def bad_weights(model: nn.Module) -> list[NaNReport]:
    """Reports on parameters and buffers that are not finite.

    An Inf in a buffer is only bad in running statistics: masks and ranges hold it on purpose.
    """
    bad = bad_reports(named_weights(model), described=0)
    return [report for report in bad if not _is_on_purpose(report)]


def bad_states(optimizer: Optimizer) -> list[NaNReport]:
    """Reports on what an optimizer keeps for each parameter; its rates are not looked at."""
    named = ((name, t) for name, t in named_states(optimizer) if ".param_groups." not in name)
    return bad_reports(named, described=0)


def _is_on_purpose(report: NaNReport) -> bool:
    is_statistic = report.location.rpartition(".")[2].startswith("running_")
    is_buffer = report.location.startswith("buffers.")
    return is_buffer and report.nan_type is not NaNType.NAN and not is_statistic


def _said(bad: list[NaNReport], where: str, remedy: str) -> Iterator[str]:
    for report in bad[:_MOST_NAMED]:
        yield f"{report.location}, which {where}, holds {report.nan_type.word}. {remedy}"
    if len(bad) > _MOST_NAMED:
        yield f"... and {len(bad) - _MOST_NAMED} more tensors, each of which {where}."


def _parameter_problems(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    trainable = {id(param) for param in model.parameters() if param.requires_grad}
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if isinstance(optimizer, LBFGS):
        yield "LBFGS calls a closure several times in a step, which this trainer has not. Use Adam."
    if not trainable:
        yield "no parameter of the model requires a gradient. Call model.requires_grad_()."
    elif not trainable & held:
        yield (
            "the optimizer holds none of the model's trainable parameters. "
            "Make it from model.parameters(), after the model was replaced or converted."
        )


def _rate_problems(optimizer: Optimizer, *, may_be_zero: bool) -> Iterator[str]:
    for number, group in enumerate(optimizer.param_groups):
        if "lr" not in group:
            continue
        rate = float(group["lr"])
        if not math.isfinite(rate) or rate < 0 or (rate == 0 and not may_be_zero):
            yield (
                f"the learning rate of group {number} is {rate:g}; it must be above 0. Give the "
                "optimizer another lr, or a scheduler that raises it."
            )


def _oddities(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    if not model.training:
        yield "the model is in eval mode; call model.train() if dropout and batch norm are to act."
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    left_out = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if left_out:
        names = ", ".join(left_out[:_MOST_NAMED]) + (", ..." if len(left_out) > _MOST_NAMED else "")
        yield f"{len(left_out)} trainable parameters are not in the optimizer: {names}."
