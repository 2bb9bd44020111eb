"""What is told of a tensor, a column for each number."""

from __future__ import annotations

from collections.abc import Callable

from stayfinite.records import TensorSummary
from stayfinite.report.wording import plain

Column = Callable[[TensorSummary], str]


def number(value: float | None) -> str:
    """A minus where no element was finite."""
    return "-" if value is None else f"{value:.4g}"


def whole(value: int) -> str:
    return str(value) if value < 1_000_000 else f"{value:.3g}"


def shape(tensor: TensorSummary) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]" if tensor.shape else "scalar"


def infinities(tensor: TensorSummary) -> str:
    """How many there are; those of -Inf are named, since a sign would make the count negative."""
    above, below = tensor.pos_inf_count, tensor.neg_inf_count
    said = [whole(above)] if above or not below else []
    return ", ".join(said + ([f"{whole(below)} of -Inf"] if below else []))


def remark(tensor: TensorSummary) -> str:
    if not tensor.bad_count:
        return "empty" if tensor.numel == 0 else ""
    index = tensor.first_bad_index
    return f"bad, first at [{', '.join(map(str, index))}]" if index else "bad"


BRIEF: dict[str, Column] = {
    "shape": shape,
    "dtype": lambda tensor: plain(tensor.dtype).removeprefix("torch."),
    "min": lambda tensor: number(tensor.min),
    "max": lambda tensor: number(tensor.max),
    "zeros": lambda tensor: whole(tensor.zero_count),
    "NaN": lambda tensor: whole(tensor.nan_count),
    "Inf": infinities,
}

FULL: dict[str, Column] = {
    **BRIEF,
    "mean": lambda tensor: number(tensor.mean),
    "std": lambda tensor: number(tensor.std),
    "negative": lambda tensor: whole(tensor.negative_count),
    "device": lambda tensor: plain(tensor.device),
}
