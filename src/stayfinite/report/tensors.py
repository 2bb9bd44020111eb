"""The table of tensors: what went into the guilty operation."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from stayfinite.records import Origin, TensorSummary
from stayfinite.report.wording import plain

WIDEST = 28  # cells of one column

Column = Callable[[TensorSummary], str]


def number(value: float | None) -> str:
    """A minus where no element was finite."""
    return "-" if value is None else f"{value:.4g}"


def whole(value: int) -> str:
    return str(value) if value < 1_000_000 else f"{value:.3g}"


def shape(tensor: TensorSummary) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]" if tensor.shape else "scalar"


def infinities(tensor: TensorSummary) -> str:
    signed = ((tensor.pos_inf_count, "+"), (tensor.neg_inf_count, "-"))
    return " ".join(f"{sign}{whole(each)}" for each, sign in signed if each) or "0"


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


def table(origin: Origin, *, verbose: bool) -> list[Text]:
    """A header and a row per input; the outputs too if verbose, or if there are no inputs."""
    if not origin.inputs:
        return _block("tensor", origin.outputs, verbose=verbose)
    lines = _block("input", origin.inputs, verbose=verbose)
    return lines + (_block("output", origin.outputs, verbose=verbose) if verbose else [])


def _block(title: str, tensors: tuple[TensorSummary, ...], *, verbose: bool) -> list[Text]:
    if not tensors:
        return []
    columns = FULL if verbose else BRIEF
    rows = [[title, *columns, ""], *(_cells(tensor, columns) for tensor in tensors)]
    widths = [min(WIDEST, max(map(cell_len, column))) for column in zip(*rows, strict=True)]
    styles = ["dim", *("red" if tensor.bad_count else "" for tensor in tensors)]
    return [_row(row, widths, style) for row, style in zip(rows, styles, strict=True)]


def _cells(tensor: TensorSummary, columns: dict[str, Column]) -> list[str]:
    return [plain(tensor.name), *(column(tensor) for column in columns.values()), remark(tensor)]


def _row(cells: list[str], widths: list[int], style: str) -> Text:
    padded = [_pad(cell, width) for cell, width in zip(cells, widths, strict=True)]
    return Text("  ".join(padded).rstrip(), style=style)


def _pad(cell: str, width: int) -> str:
    if cell_len(cell) > width:
        return set_cell_size(cell, width - 3) + "..."
    return set_cell_size(cell, width)
