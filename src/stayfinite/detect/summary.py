"""Numbers that describe one tensor."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from stayfinite.detect.memory import is_readable, pieces, plain_parts, undisturbed
from stayfinite.records import TensorSummary

# float64 values near the end of their range are made smaller before they are squared.
_SHRINK = 2.0**-540
# A float64 is m * 2**e with 0.5 <= |m| < 1 and e from -1073 to 1024.
_LEAST, _MOST = -1073, 1024


@undisturbed
def summarize(name: str, tensor: Tensor) -> TensorSummary:
    """Counts, finite statistics and the first bad index of the tensor.

    It is read in small pieces, on the host: meant for the few tensors worth a description.
    `std` is that of the population (0 for one element). A complex element counts once, as the
    worst of its two parts, and the statistics are over the parts. Of a sparse tensor the stored
    values are described. Ragged sizes are -1. `first_bad_index` is None where the memory is not
    laid out like the shape (compressed sparse, nested, shards).
    """
    parts = [part for part in plain_parts(tensor) if is_readable(part.dtype)]
    tally = _tally(parts, scale=1.0)
    if not math.isfinite(tally.squares):
        tally = _tally(parts, scale=_SHRINK)
    return TensorSummary(
        name=name,
        shape=shape_of(tensor),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        numel=sum(part.numel() for part in parts),
        **tally.counts,
        **tally.statistics(),
        first_bad_index=_in_tensor(tensor, parts, tally.first_bad),
        histogram=tally.histogram(),
    )


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape with plain numbers; -1 for a size that varies or is not known yet."""
    if is_lazy(tensor):
        return ()
    if tensor.is_nested:
        return (tensor.size(0),) + (-1,) * (tensor.dim() - 1)
    return tuple(size if type(size) is int else -1 for size in tensor.shape)


def _no_counts() -> dict[str, int]:
    kinds = ("nan_count", "pos_inf_count", "neg_inf_count", "zero_count", "negative_count")
    return dict.fromkeys(kinds, 0)


@dataclass
class _Tally:
    """What has been counted so far; mean and squares (about the mean) are in units of 1/scale."""

    scale: float
    counts: dict[str, int] = field(default_factory=_no_counts)
    finite: int = 0
    min: float = math.inf
    max: float = -math.inf
    mean: float = 0.0
    squares: float = 0.0
    first_bad: tuple[int, ...] | None = None
    bins: Tensor | None = None

    def add(self, start: tuple[int, ...], piece: Tensor) -> None:
        values = _components(piece)
        finite = values.isfinite()
        self._count("zero_count", (values == 0).all(-1))
        self._count("negative_count", (values < 0).any(-1))
        if not finite.all():
            self._add_bad(values)
            bad = int(finite.all(-1).logical_not().to(torch.uint8).argmax())
            self.first_bad = self.first_bad or _index(start, piece, bad)
            values = values[finite]
        if values.numel():
            self._add_finite(values)

    def _count(self, kind: str, mask: Tensor) -> None:
        self.counts[kind] += int(mask.sum())

    def _add_bad(self, values: Tensor) -> None:
        nan = values.isnan().any(-1)
        above = (values == math.inf).any(-1) & ~nan
        self._count("nan_count", nan)
        self._count("pos_inf_count", above)
        self._count("neg_inf_count", (values == -math.inf).any(-1) & ~nan & ~above)

    def _add_finite(self, values: Tensor) -> None:
        low, high = values.aminmax()
        self.min, self.max = min(self.min, low.item()), max(self.max, high.item())
        variance, mean = torch.var_mean(values * self.scale, correction=0)
        new = values.numel()
        total = self.finite + new
        apart = mean.item() - self.mean
        # Two means and sums of squares joined (Chan, Golub, LeVeque 1979).
        self.squares += variance.item() * new + apart * apart * self.finite * new / total
        self.mean += apart * new / total
        self.finite = total
        counts = _magnitudes(values)
        self.bins = counts if self.bins is None else self.bins + counts

    def histogram(self) -> tuple[tuple[float, int], ...]:
        counts = [] if self.bins is None else self.bins.tolist()
        return tuple((_limit(index), count) for index, count in enumerate(counts) if count)

    def statistics(self) -> dict[str, Any]:
        if not self.finite:
            return {}
        std = math.sqrt(self.squares / self.finite) / self.scale
        return {"min": self.min, "max": self.max, "mean": self.mean / self.scale, "std": std}


def _magnitudes(values: Tensor) -> Tensor:
    """How many values have which sign and exponent: large negative ones first, 0 in the middle."""
    _, exponents = torch.frexp(values.flatten())
    distance = torch.where(values.flatten() == 0, 0, exponents.long() - (_LEAST - 1))
    middle = _MOST - _LEAST + 1
    return torch.bincount(
        middle + distance * values.flatten().sign().long(), minlength=2 * middle + 1
    )


def _limit(index: int) -> float:
    """The largest value that is counted there, or the next power of two above it."""
    distance = index - (_MOST - _LEAST + 1)
    if distance <= 0:
        return -math.ldexp(1.0, -distance + _LEAST - 2) if distance else 0.0
    return (
        math.ldexp(1.0, distance + _LEAST - 1)
        if distance < _MOST - _LEAST + 1
        else sys.float_info.max
    )


def _tally(parts: list[Tensor], *, scale: float) -> _Tally:
    tally = _Tally(scale=scale)
    for part in parts:
        for start, piece in pieces(part):
            tally.add(start, piece)
    return tally


def _components(piece: Tensor) -> Tensor:
    """The piece on the host in double precision: one row for each element."""
    piece = piece.to("cpu")
    real = torch.view_as_real(piece.resolve_conj()) if piece.is_complex() else piece.resolve_neg()
    return real.to(torch.float64).reshape(piece.numel(), -1)


def _index(start: tuple[int, ...], piece: Tensor, position: int) -> tuple[int, ...]:
    inside: list[int] = []
    for size in reversed(piece.shape):
        position, remainder = divmod(position, size)
        inside.insert(0, remainder)
    padded = [0] * (len(start) - len(inside)) + inside
    return tuple(first + more for first, more in zip(start, padded, strict=True))


def _in_tensor(
    tensor: Tensor, parts: list[Tensor], index: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The index into the tensor of an index into its only part, if the two can be matched."""
    if index is None or len(parts) != 1:
        return None
    if tensor.layout is torch.sparse_coo:
        return (*tensor._indices()[:, index[0]].tolist(), *index[1:])
    return index if parts[0].shape == tensor.shape else None
