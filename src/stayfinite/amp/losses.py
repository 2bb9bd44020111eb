"""From a batch to its loss: one number, and the named terms it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from stayfinite.errors import InputError

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
