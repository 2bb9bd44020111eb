"""What a check tells: from tensors to NaNReports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from stayfinite.detect.scan import all_finite, classify, summarize
from stayfinite.detect.summary import shape_of
from stayfinite.detect.walk import Named
from stayfinite.errors import InputError
from stayfinite.records import NaNReport, NaNType, to_data

_ACTIONS = {
    "loss": "Do not call backward() on it; find what made it with NaNDetector.find_nan_source().",
    "gradients": "Skip this optimizer step, or the weights turn bad too; "
    "find what made it with NaNDetector.find_nan_source().",
    "parameters": "Load the last good checkpoint: training cannot heal a bad weight.",
    "buffers": "Load the last good checkpoint, or reset the running statistics of this layer.",
    "optimizer": "Load the last good checkpoint: the next step would write it into the weights.",
    "inputs": "Leave this sample out, and check how the data was loaded and normalized.",
}
_OTHER = "Call stayfinite.check_tensor() on the tensors that it was computed from."


def report_on(location: str, tensor: Tensor) -> NaNReport:
    """What is wrong with this tensor, if anything; a bad one is described."""
    if all_finite([tensor]):
        return clean_report(location, tensor)
    return _bad_report(location, tensor, described=True)


def clean_report(location: str, tensor: Tensor) -> NaNReport:
    return NaNReport(
        has_nan=False, nan_type=NaNType.NONE, location=location, tensor_shape=shape_of(tensor)
    )


def bad_reports(named: Iterable[Named], *, described: int | None = None) -> list[NaNReport]:
    """Reports on the bad tensors only; at most `described` of them (None: all) with statistics."""
    named = list(named)
    if all_finite(tensor for _, tensor in named):
        return []
    bad = [(location, tensor) for location, tensor in named if not all_finite([tensor])]
    limit = len(bad) if described is None else described
    return [
        _bad_report(location, tensor, described=number < limit)
        for number, (location, tensor) in enumerate(bad)
    ]


def _bad_report(location: str, tensor: Tensor, *, described: bool) -> NaNReport:
    stats: dict[str, Any] | None = to_data(summarize(location, tensor)) if described else None
    if stats is not None:
        stats = {key: stats[key] for key in stats if key not in ("name", "shape")}
    kind = classify(tensor)
    return NaNReport(
        has_nan=True,
        nan_type=kind,
        location=location,
        tensor_shape=shape_of(tensor),
        tensor_stats=stats,
        suggested_action=f"{location} holds {kind.word}. {_action(location)}",
    )


def _action(location: str) -> str:
    return _ACTIONS.get(location.partition(".")[0], _OTHER)


def require_tensor(value: Any, call: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    raise InputError(f"{call} got a {type(value).__name__}; it accepts a torch.Tensor.")


def require_model(value: Any, call: str) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise InputError(f"{call} got a {type(value).__name__}; it accepts a torch.nn.Module.")
    if next(value.parameters(), None) is None:
        raise InputError(
            f"{call} got a {type(value).__name__} without parameters; "
            "give it the model that is trained."
        )
    return value
