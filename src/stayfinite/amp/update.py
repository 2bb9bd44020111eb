"""One batch: its loss, backward and, at the end of its window, the update.

With what is wrong before the first one, all of it at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping
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
from stayfinite.nested import named_states, named_weights, own_loss
from stayfinite.records import Incident, NaNReport, NaNType
from stayfinite.training import gradients_of, params_of

logger = logging.getLogger("stayfinite")
LossFunction = Callable[[Any, Any], Any]
_MOST_NAMED = 5


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
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What came of a batch. `loss` is that of this batch alone, neither scaled nor divided.

    It is None if the scaler skipped the update that it led to. The statistics are there when they
    were due: before clipping, and after it.
    """

    loss: Tensor | None
    terms: dict[str, Tensor] = field(default_factory=dict)
    was_update: bool = False
    before: GradientStatistics | None = None
    after: GradientStatistics | None = None


class Update:
    """Called with each batch; at the last one of a window it updates the weights.

    `incidents` grows when the guard finds something bad, also in the middle of an update;
    `after_update` is called when weights have moved.
    """

    def __init__(
        self,
        config: AMPConfig,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction | None,
        *,
        device: torch.device,
        incidents: list[Incident],
        after_update: Callable[[], None],
    ) -> None:
        self.optimizer, self.incidents = optimizer, incidents
        self.scaler = scaler_for(config, device)
        self.window = Accumulation()
        self.bad_losses: dict[str, Tensor] = {}  # of this window, also of runs that were undone
        self._config, self._model, self._loss_fn, self._device = config, model, loss_fn, device
        self._after_update = after_update
        self._looks_at_loss = True

    def begin_window(self, size: int, *, looks_at_loss: bool) -> None:
        """A window of so many batches begins."""
        self.window.size = size
        self._looks_at_loss = looks_at_loss
        self.bad_losses.clear()

    def losses(self, batch: Any, *, model: nn.Module | None = None) -> BatchLosses:
        """The loss of this batch, under autocast as configured."""
        autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._config.precision != "fp32":  # there all is as without it
            autocast = torch.autocast(self._device.type, dtype=self._config.dtype)
        with autocast:
            model = self._model if model is None else model
            return losses_of(batch, model=model, loss_fn=self._loss_fn)

    def __call__(self, batch: Any) -> BatchResult:
        window = self.window
        if window.is_at_start:
            self.optimizer.zero_grad()
        losses = self.losses(batch)
        note_terms(losses.terms)
        if self._looks_at_loss:
            self._look_at(losses)
        loss = losses.total if window.size == 1 else losses.total / window.size
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        window.batches += 1
        terms = {name: term.detach() for name, term in losses.terms.items()}
        done = BatchResult(loss=losses.total.detach(), terms=terms)
        return done if window.batches < window.size else self._end_window(done)

    def _look_at(self, losses: BatchLosses) -> None:
        """Note what is bad: of the terms that have a part in the gradient, and the total.

        A term without a gradient is a number to look at, such as an accuracy; it may be NaN.
        """
        terms = [(f"loss.{name}", t) for name, t in losses.terms.items() if t.requires_grad]
        named = [*terms, ("loss", losses.total)]
        # A finite number on the CPU is known at once; all else is looked at properly.
        doubtful = [(name, loss) for name, loss in named if finite_number(loss) is None]
        if not all_finite(loss for _, loss in doubtful):
            for name, loss in doubtful:
                if not all_finite([loss]):
                    self.bad_losses.setdefault(name, loss.detach())

    def _end_window(self, done: BatchResult) -> BatchResult:
        """Unscale, look, clip, step, update the scale, then whoever follows."""
        config, optimizer, window = self._config, self.optimizer, self.window
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        is_due = config.log_every > 0 and (window.updates + 1) % config.log_every == 0
        before = after = gradient_statistics(self._model) if is_due else None
        # What is bad must not be clipped away: the guard and the scaler judge it after this.
        limit = config.gradient_clip_val
        if limit is not None and all_finite(gradients_of(optimizer), writable=True):
            clip_gradients(optimizer, limit)
            after = gradient_statistics(self._model) if is_due else None
        was_update = self._step()
        if was_update:
            window.updates += 1
            self._after_update()
        window.batches = 0
        loss = done.loss if was_update else None
        return BatchResult(
            loss=loss, terms=done.terms, was_update=was_update, before=before, after=after
        )

    def _step(self) -> bool:
        """Whether weights have moved: neither the scaler nor the guard has taken that back."""
        optimizer, scaler, seen = self.optimizer, self.scaler, len(self.incidents)
        if scaler is None:
            optimizer.step()
            return len(self.incidents) == seen
        scaler.step(optimizer)
        if len(self.incidents) > seen:  # all is as in a snapshot, the scaler too
            return False
        # Nothing public says whether a step was skipped, and after update() nothing does.
        found = scaler._found_inf_per_device(optimizer).values()
        was_skipped = any(bool(flag) for flag in found)  # host sync
        scaler.update()
        return not was_skipped


def scaler_for(config: AMPConfig, device: torch.device) -> DynamicLossScaler | None:
    """The scaler that the config asks for; one that cannot move for a fixed scale."""
    scale = config.loss_scale
    if scale == "dynamic" or (scale is None and config.precision == "fp16"):
        return DynamicLossScaler(device)
    if scale is None:
        return None
    return DynamicLossScaler(device, scale, min_scale=scale, max_scale=scale)


@dataclass(frozen=True, kw_only=True)
class BatchLosses:
    """The loss to descend on, and its named terms where it has some."""

    total: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)


def losses_of(batch: Any, *, model: nn.Module, loss_fn: LossFunction | None) -> BatchLosses:
    """The loss of this batch; InputError when batch or result are of no known form."""
    if loss_fn is not None:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise InputError(
                f"the batch is a {type(batch).__name__}{size}; with a loss_fn it must be "
                "(inputs, targets). Do not pass loss_fn if the model computes its own loss."
            )
        inputs, targets = batch
        return _losses_in(loss_fn(model(inputs), targets), "loss_fn")
    if isinstance(batch, Mapping):
        return _losses_in(model(**batch), "the model")
    args = batch if isinstance(batch, (tuple, list)) else (batch,)
    return _losses_in(model(*args), "the model")


def _losses_in(result: Any, maker: str) -> BatchLosses:
    named: Mapping[str, Any] = result if isinstance(result, Mapping) else {}
    total = result if isinstance(result, Tensor) else own_loss(result)
    terms = {name: v for name, v in named.items() if name != "loss" and _is_term(v)}
    if isinstance(total, Tensor):
        if not _is_term(total):
            raise InputError(
                f"{maker} returned a loss of shape {list(total.shape)} and {total.dtype}; it must "
                "be one real number. Reduce it, such as with .mean()."
            )
        return BatchLosses(total=total, terms=terms)
    if not isinstance(result, Mapping):
        raise InputError(
            f"{maker} returned a {type(result).__name__}; it must return a tensor, named terms in "
            'a dict, or something with a "loss".'
        )
    if not terms:
        names = ", ".join(map(str, result)) or "nothing"
        raise InputError(
            f'{maker} returned a mapping of {names}; it must have a "loss", or terms to add up '
            "that are tensors of one element. Does the batch lack its labels?"
        )
    return BatchLosses(total=functools.reduce(operator.add, terms.values()), terms=terms)


def _is_term(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


@dataclass(frozen=True, kw_only=True)
class GradientStatistics:
    """The norm of all gradients, and those parameters whose own norm is largest."""

    norm: float
    largest: tuple[tuple[str, float], ...] = ()


@torch.no_grad()
def gradient_statistics(model: nn.Module) -> GradientStatistics:
    """The statistics of its parameters' gradients; one host read for all of them.

    Norms are taken in float64, so that large finite gradients do not overflow. A sparse one
    counts by the numbers that it holds, added up by place.
    """
    norms: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        if (grad := param.grad) is not None:
            widest = torch.float32 if grad.device.type == "mps" else torch.float64
            held = grad.coalesce().values() if grad.is_sparse else grad
            dtype = torch.promote_types(grad.dtype, widest)
            norms[name] = torch.linalg.vector_norm(held, dtype=dtype)
    if not norms:
        return GradientStatistics(norm=0.0)
    device = next(iter(norms.values())).device
    values = torch.stack([norm.to(device) for norm in norms.values()])
    total, *each = torch.cat([torch.linalg.vector_norm(values)[None], values]).tolist()  # host sync
    by_size = sorted(zip(norms, each, strict=True), key=lambda one: -one[1])
    return GradientStatistics(norm=total, largest=tuple(by_size[:_MOST_NAMED]))


def require_kinds(config: Any, model: Any, optimizer: Any) -> None:
    """InputError for the first that is of another kind."""
    kinds = {"config": AMPConfig, "model": nn.Module, "optimizer": Optimizer}
    for (name, kind), value in zip(kinds.items(), (config, model, optimizer), strict=True):
        if not isinstance(value, kind):
            raise InputError(f"{name} is a {type(value).__name__}; it must be a {kind.__name__}.")


def require_ready(model: nn.Module, optimizer: Optimizer, *, has_scheduler: bool) -> None:
    """TrainingSetupError with all that no recovery could mend; what is only odd is logged.

    The first batch is not looked at: a bad one is recovered from as any other.
    """
    problems = list(_problems(model, optimizer, has_scheduler=has_scheduler))
    if problems:
        raise TrainingSetupError(problems)
    if not model.training:
        logger.warning(
            "the model is in eval mode; call model.train() if dropout and batch norm are to act."
        )
    held = set(map(id, params_of(optimizer)))
    left_out = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if left_out:
        names = ", ".join(left_out[:_MOST_NAMED]) + (", ..." if len(left_out) > _MOST_NAMED else "")
        logger.warning(f"{len(left_out)} trainable parameters are not in the optimizer: {names}.")


def _problems(model: nn.Module, optimizer: Optimizer, *, has_scheduler: bool) -> Iterator[str]:
    for bad, where, remedy in (
        (bad_weights(model), "is in the model", "Load a good checkpoint, or initialise it."),
        (bad_states(optimizer), "is in the optimizer", "Load a good one, or create a new one."),
    ):
        for report in bad[:_MOST_NAMED]:
            yield f"{report.location}, which {where}, holds {report.nan_type.word}. {remedy}"
        if len(bad) > _MOST_NAMED:
            yield f"... and {len(bad) - _MOST_NAMED} more tensors, each of which {where}."
    if isinstance(optimizer, LBFGS):
        yield "LBFGS calls a closure several times in a step, which this trainer has not. Use Adam."
    trainable = {id(param) for param in model.parameters() if param.requires_grad}
    if not trainable:
        yield "no parameter of the model requires a gradient. Call model.requires_grad_()."
    elif trainable.isdisjoint(map(id, params_of(optimizer))):
        yield (
            "the optimizer holds none of the model's trainable parameters. "
            "Make it from model.parameters(), after the model was replaced or converted."
        )
    for number, group in enumerate(optimizer.param_groups):
        rate = float(group.get("lr", 1.0))
        if not math.isfinite(rate) or rate < 0 or (rate == 0 and not has_scheduler):
            yield (
                f"the learning rate of group {number} is {rate:g}; it must be above 0. Give the "
                "optimizer another lr, or a scheduler that raises it."
            )


def bad_weights(model: nn.Module) -> list[NaNReport]:
    """Reports on parameters and buffers that are not finite.

    An Inf in a buffer is only bad in running statistics: masks and ranges hold it on purpose.
    """

    def is_on_purpose(report: NaNReport) -> bool:
        kind, _, name = report.location.partition(".")
        is_statistic = name.rpartition(".")[2].startswith("running_")
        return kind == "buffers" and report.nan_type is not NaNType.NAN and not is_statistic

    return [
        report
        for report in bad_reports(named_weights(model), described=0)
        if not is_on_purpose(report)
    ]


def bad_states(optimizer: Optimizer) -> list[NaNReport]:
    """Reports on what an optimizer keeps for each parameter; its rates are not looked at."""
    named = ((name, t) for name, t in named_states(optimizer) if ".param_groups." not in name)
    return bad_reports(named, described=0)
