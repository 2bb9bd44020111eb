"""Inputs and targets that are all large or tiny, and columns that do not vary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stayfinite.prevent.data.inspection import Inspection
from stayfinite.prevent.data.judgement import Judgement, named_columns
from stayfinite.prevent.data.outliers import FEWEST_ROWS, usual_size
from stayfinite.prevent.data.roles import Role
from stayfinite.prevent.data.tally import Tally
from stayfinite.prevent.data.wording import Said
from stayfinite.prevent.risks import Level

# Sizes at which a first layer of torch's default weights and an ordinary rate no longer get along.
_LARGE_COLUMN = 300.0
_LARGE = 100.0
_LARGE_TARGET = 1e4
_HUGE = 1e5
_TINY = 1e-6
# White is 255, but not every picture has a white spot.
_PIXELS = (100.0, 255.0)
_HARDLY = 1e-6


def scale(inspection: Inspection, tally: Tally) -> Iterator[Judgement]:
    """Values that are large or tiny throughout."""
    role = inspection.roles[tally.path]
    if role not in (Role.INPUT, Role.TARGET) or tally.elements.numel() < FEWEST_ROWS:
        return
    usual = usual_size(tally.elements)
    columns = _large_columns(tally)
    if role is Role.TARGET:
        if usual >= _LARGE_TARGET:
            yield _large_target(tally, usual)
    elif columns:
        largest = max(columns.values())
        yield _large(
            tally, largest, f"About {largest:.3g} is usual in {named_columns([*columns])}."
        )
    elif tally.columns is None and _are_pixels(tally):
        yield _large(tally, usual, f"These look like pixels from 0 to {tally.highest:.0f}.")
    elif tally.columns is None and usual >= _LARGE:
        yield _large(tally, usual, f"The values are about {usual:.3g} in size.")
    elif 0 < usual < _TINY:
        yield _tiny(tally, usual)


def _large(tally: Tally, usual: float, what: str) -> Judgement:
    said = Said(
        level="high" if usual >= _HUGE else "medium",
        what=f"{what} Activations and gradients grow by that factor.",
        fix="Standardise with the statistics of the training set, "
        "`(x - mean) / std.clamp_min(1e-6)`; pixels, `x / 255`.",
        cause="unnormalized_input",
        evidence={"usual": usual},
    )
    return Judgement(kind="scale", path=tally.path, said=said)


def _large_target(tally: Tally, usual: float) -> Judgement:
    said = Said(
        level="medium",
        what=f"The targets are about {usual:.3g} in size, a squared error {usual**2:.1g}.",
        fix="Predict `(y - mean) / std`, or `torch.log1p(y)` of amounts.",
        cause="unnormalized_input",
        evidence={"usual": usual},
    )
    return Judgement(kind="scale", path=tally.path, said=said)


def _tiny(tally: Tally, usual: float) -> Judgement:
    said = Said(
        level="low",
        what=f"The values are about {usual:.3g} in size, less than the eps of a normalisation.",
        fix="Standardise them: `(x - mean) / std`.",
        cause="low_precision_underflow",
        evidence={"usual": usual},
    )
    return Judgement(kind="scale", path=tally.path, said=said)


def _large_columns(tally: Tally) -> dict[int, float]:
    if tally.columns is None:
        return {}
    sizes = tally.elements.abs()
    usual = torch.where(sizes > 0, sizes, torch.nan).nanmedian(0).values
    large = (usual >= _LARGE_COLUMN).nonzero().flatten().tolist()
    return {column: float(usual[column]) for column in large}


def _are_pixels(tally: Tally) -> bool:
    if not (tally.lowest >= 0 and _PIXELS[0] <= tally.highest <= _PIXELS[1]):
        return False
    elements = tally.elements[tally.elements.isfinite()]
    is_picture = tally.shape is None or len(tally.shape) >= 2
    return is_picture and bool((elements == elements.round()).all())


def unvarying(inspection: Inspection, tally: Tally) -> Iterator[Judgement]:
    """Columns or channels that are the same in all rows, or rows that are all the same."""
    role = inspection.roles[tally.path]
    if role not in (Role.INPUT, Role.TARGET) or tally.is_sparse or tally.rows < FEWEST_ROWS:
        return
    elements = tally.elements
    if elements.isfinite().any() and _all_alike(elements):
        yield _same_rows(tally, _is_only_input(inspection, tally))
    elif columns := _constant_columns(tally, elements):
        yield _constant(columns, tally)


def _all_alike(elements: Tensor) -> bool:
    return bool(((elements == elements[0]) | elements.isnan()).all())


def _is_only_input(inspection: Inspection, tally: Tally) -> bool:
    inputs = [path for path, role in inspection.roles.items() if role is Role.INPUT]
    return inputs == [tally.path]


def _same_rows(tally: Tally, is_only_input: bool) -> Judgement:
    level: Level = "high" if is_only_input else "low"
    said = Said(
        level=level,
        what=f"All {len(tally.elements):,} rows that were compared are the same.",
        fix="If that is not meant, look at how the dataset uses its index; where it is "
        "standardised, divide by `std.clamp_min(1e-6)`.",
        cause="bad_input_data",
    )
    return Judgement(kind="same_rows", path=tally.path, said=said)


def _constant_columns(tally: Tally, elements: Tensor) -> dict[int, float]:
    ranges = tally.channels
    if ranges is None:
        return {}
    is_constant = ranges.low == ranges.high
    if tally.columns is not None:
        is_constant |= tally.moments.std <= _HARDLY * tally.moments.mean.abs()
        is_constant &= tally.moments.count > 0
    if (elements == 0).sum() > elements.numel() / 2:
        # One-hot, padded or sparse: what was never set is no surprise.
        is_constant &= ranges.low != 0
    return {n: float(ranges.low[n]) for n in is_constant.nonzero().flatten().tolist()}


def _constant(columns: dict[int, float], tally: Tally) -> Judgement:
    numbers = list(columns)
    name = "column" if tally.shape is not None and len(tally.shape) == 1 else "channel"
    value = f"{columns[numbers[0]]:.4g}" if len(set(columns.values())) == 1 else "constant"
    verb = "is" if len(numbers) == 1 else "are"
    said = Said(
        level="low",
        what=f"{named_columns(numbers, name).capitalize()} {verb} {value} in all "
        f"{tally.rows:,} rows.",
        fix="Leave out what does not vary; where it is standardised, divide by "
        "`std.clamp_min(1e-6)`, since its std is 0.",
        cause="division_by_zero",
        evidence={"columns": len(numbers), "first": numbers[0]},
    )
    return Judgement(kind="constant", path=tally.path, said=said)
