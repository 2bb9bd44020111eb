"""One batch: its loss, backward and, at the end of its window, the update.

With what is wrong before the first one, all of it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from stayfinite.amp.config import AMPConfig
from stayfinite.amp.scaler import DynamicLossScaler
from stayfinite.clip import clip_gradients
from stayfinite.detect.detector import bad_reports, note_terms
from stayfinite.detect.finite import all_finite, finite_number
from stayfinite.errors import InputError, TrainingSetupError
from stayfinite.nested import named_states, named_weights
from stayfinite.records import Incident, NaNReport, NaNType
from stayfinite.training import gradients_of


@dataclass(kw_only=True)
class Accumulation:
    """Where training is: updates made, and batches in the window that leads to the next one.

    It has the methods of a scheduler, so that a snapshot holds it and a step that is undone
    leaves no trace in it.
    """

    updates: int = 0
    batches: int = 0
    size: int = 1

    @property
    def is_at_start(self) -> bool:
        return self.batches == 0

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates, "batches": self.batches, "size": self.size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.updates, self.batches = state["updates"], state["batches"]
        self.size = state["size"]


@dataclass(frozen=True, kw_only=True)
class Done:
    """What came of a batch. `loss` is that of this batch alone, neither scaled nor divided.

    An update that was attempted but is none was skipped by the scaler. The statistics are there
    when they were due: before clipping, and after it.
    """

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)
    was_attempted: bool = False
    was_update: bool = False
    before: GradientStatistics | None = None
    after: GradientStatistics | None = None

    @property
    def kept_loss(self) -> Tensor | None:
        """The loss, unless the update that it led to was skipped."""
        return None if self.was_attempted and not self.was_update else self.loss


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an update works on; `after_update` is called when weights have moved.

    `incidents` grows when the guard finds something bad, also in the middle of an update.
    """

    config: AMPConfig
    model: nn.Module
    optimizer: Optimizer
    loss_fn: LossFunction | None
    device: torch.device
    scaler: DynamicLossScaler | None
    window: Accumulation
    after_update: Callable[[], None]
    incidents: list[Incident]


class Update:
    """Called with each batch; at the last one of a window it updates the weights."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.looks_at_loss = True
        self.bad_losses: dict[str, Tensor] = {}  # of this window, also of runs that were undone

    def begin_window(self, size: int, *, looks_at_loss: bool) -> None:
        """A window of so many batches begins."""
        self._setup.window.size = size
        self.looks_at_loss = looks_at_loss
        self.bad_losses.clear()

    def __call__(self, batch: Any) -> Done:
        setup, window = self._setup, self._setup.window
        if window.is_at_start:
            setup.optimizer.zero_grad()
        with autocast_for(setup.config, setup.device):
            losses = losses_of(batch, model=setup.model, loss_fn=setup.loss_fn)
        note_terms(losses.terms)
        self._look_at(losses.named())
        self._backward(losses.total)
        window.batches += 1
        terms = {name: term.detach() for name, term in losses.terms.items()}
        done = Done(loss=losses.total.detach(), terms=terms)
        return self._updated(done) if window.batches >= window.size else done

    def _look_at(self, named: list[tuple[str, Tensor]]) -> None:
        # A finite number on the CPU is known at once; all else is looked at properly.
        doubtful = [item for item in named if finite_number(item[1]) is None]
        if self.looks_at_loss and not all_finite(loss for _, loss in doubtful):
            for name, loss in doubtful:
                if not all_finite([loss]):
                    self.bad_losses.setdefault(name, loss.detach())

    def _backward(self, loss: Tensor) -> None:
        scaler, size = self._setup.scaler, self._setup.window.size
        loss = loss if size == 1 else loss / size
        (loss if scaler is None else scaler.scale(loss)).backward()

    def _updated(self, done: Done) -> Done:
        """Unscale, look, clip, step, update the scale, then whoever follows."""
        setup = self._setup
        if setup.scaler is not None:
            setup.scaler.unscale_(setup.optimizer)
        before, after = self._clipped()
        was_update = self._stepped()
        if was_update:
            setup.window.updates += 1
            setup.after_update()
        setup.window.batches = 0
        return dataclasses.replace(
            done, was_attempted=True, was_update=was_update, before=before, after=after
        )

    def _clipped(self) -> tuple[GradientStatistics | None, GradientStatistics | None]:
        """Statistics before and after clipping, if they are due."""
        config, optimizer = self._setup.config, self._setup.optimizer
        is_due = config.log_every > 0 and (self._setup.window.updates + 1) % config.log_every == 0
        before = self._statistics() if is_due else None
        if config.gradient_clip_val is None:
            return before, before
        # What is bad must not be clipped away: the guard and the scaler judge it after this.
        if all_finite(gradients_of(optimizer), writable=True):
            clip_gradients(optimizer, config.gradient_clip_val)
        return before, self._statistics() if is_due else None

    def _statistics(self) -> GradientStatistics:
        return gradient_statistics(self._setup.model.named_parameters())

    def _stepped(self) -> bool:
        """Whether weights have moved: neither the scaler nor the guard has taken that back."""
        optimizer, scaler, seen = self._setup.optimizer, self._setup.scaler, self._incidents()
        if scaler is None:
            optimizer.step()
            return self._incidents() == seen
        scaler.step(optimizer)
        if self._incidents() > seen:  # all is as in a snapshot, the scaler too
            return False
        found = scaler._found_inf_per_device(optimizer).values()
        was_skipped = any(bool(flag) for flag in found)  # host sync
        scaler.update()
        return not was_skipped

    def _incidents(self) -> int:
        return len(self._setup.incidents)


LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The loss to descend on, and its named terms where it has some."""

    total: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)

    def named(self) -> list[tuple[str, Tensor]]:
        """What has to be finite: the terms that have a part in the gradient, then the total.

        A term without a gradient is a number to look at, such as an accuracy; it may be NaN.
        """
        terms = [(f"loss.{name}", term) for name, term in self.terms.items() if term.requires_grad]
        return [*terms, ("loss", self.total)]


def losses_of(batch: Any, *, model: nn.Module, loss_fn: LossFunction | None) -> Losses:
    """The loss of this batch; InputError when batch or result are of no known form."""
    if loss_fn is None:
        return _from_result(_called(model, batch), "the model")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise InputError(
            f"the batch is a {type(batch).__name__}{size}; with a loss_fn it must be "
            "(inputs, targets). Leave loss_fn out if the model computes its own loss."
        )
    inputs, targets = batch
    return _from_result(loss_fn(model(inputs), targets), "loss_fn")


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _from_result(result: Any, maker: str) -> Losses:
    if isinstance(result, Tensor):
        return Losses(total=_one_number(result, maker))
    if isinstance(result, Mapping):
        return _from_terms(result, maker)
    loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return Losses(total=_one_number(loss, maker))
    raise InputError(
        f"{maker} returned a {type(result).__name__}; it must return a tensor, named terms in a "
        'dict, or something with a "loss".'
    )


def _from_terms(result: Mapping[str, Any], maker: str) -> Losses:
    terms = {name: value for name, value in result.items() if _is_term(value)}
    total = result.get("loss")
    if isinstance(total, Tensor):
        terms.pop("loss", None)
        return Losses(total=_one_number(total, maker), terms=terms)
    if not terms:
        names = ", ".join(map(str, result)) or "nothing"
        raise InputError(
            f'{maker} returned a mapping of {names}; it must have a "loss", or terms to add up '
            "that are tensors of one element. Does the batch lack its labels?"
        )
    first, *others = terms.values()
    for other in others:
        first = first + other
    return Losses(total=first, terms=terms)


def _is_term(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _one_number(loss: Tensor, maker: str) -> Tensor:
    if not _is_term(loss):
        raise InputError(
            f"{maker} returned a loss of shape {list(loss.shape)} and {loss.dtype}; it must be one "
            "real number. Reduce it, such as with .mean()."
        )
    return loss


Norms = list[tuple[str, float]]


@dataclass(frozen=True, kw_only=True)
class GradientStatistics:
    """The norm of all gradients, and those parameters whose own norm is largest."""

    norm: float
    largest: tuple[tuple[str, float], ...] = ()


@torch.no_grad()
def gradient_statistics(
    named: Iterable[tuple[str, Tensor]], *, shown: int = 5
) -> GradientStatistics:
    """The statistics of these parameters' gradients; one host read for all of them.

    Norms are taken in float64, so that large finite gradients do not overflow.
    """
    having = [(name, param.grad) for name, param in named if param.grad is not None]
    norms = [torch.linalg.vector_norm(_dense(grad), dtype=_wide(grad)) for _, grad in having]
    if not norms:
        return GradientStatistics(norm=0.0)
    values = torch.stack([norm.to(norms[0].device) for norm in norms])
    total, *each = torch.cat([torch.linalg.vector_norm(values)[None], values]).tolist()  # host sync
    by_size = sorted(zip((name for name, _ in having), each, strict=True), key=lambda one: -one[1])
    return GradientStatistics(norm=total, largest=tuple(by_size[:shown]))


def _dense(gradient: Tensor) -> Tensor:
    """The numbers of a gradient; of a sparse one those that it holds, added up by place."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _wide(gradient: Tensor) -> torch.dtype:
    has_double = gradient.device.type != "mps"
    return torch.promote_types(gradient.dtype, torch.float64 if has_double else torch.float32)


def autocast_for(config: AMPConfig, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast as configured; in fp32 nothing, so that all is as without it."""
    if config.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=config.dtype)


def scaler_for(config: AMPConfig, device: torch.device) -> DynamicLossScaler | None:
    """The scaler that the config asks for; one that cannot move for a fixed scale."""
    scale = config.loss_scale
    if scale is None:
        scale = "dynamic" if config.precision == "fp16" else None
    if scale is None:
        return None
    if scale == "dynamic":
        return DynamicLossScaler(device)
    return DynamicLossScaler(device, scale, min_scale=scale, max_scale=scale)


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
