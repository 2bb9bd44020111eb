"""The table of tensors: what went into the guilty operation."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from stayfinite.records import Origin, TensorSummary
from stayfinite.report.columns import BRIEF, Column
from stayfinite.report.columns import FULL as FULL
from stayfinite.report.columns import remark as remark
from stayfinite.report.wording import plain

WIDEST = 28  # cells of one column


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
