"""Numbers that describe one tensor."""

from __future__ import annotations

import math
import sys
from collections import Counter
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
    tally = _Tally(parts, scale=1.0)
    if not math.isfinite(tally.squares):
        tally = _Tally(parts, scale=_SHRINK)
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


class _Tally:
    """What there is in the parts; mean and squares (about the mean) are in units of 1/scale."""

    def __init__(self, parts: list[Tensor], *, scale: float) -> None:
        self.scale = scale
        self.counts: Counter[str] = Counter()
        self.finite = 0
        self.min, self.max, self.mean, self.squares = math.inf, -math.inf, 0.0, 0.0
        self.first_bad: tuple[int, ...] | None = None
        self.bins: Tensor | None = None
        for part in parts:
            for start, piece in pieces(part):
                self._add(start, piece)

    def _add(self, start: tuple[int, ...], piece: Tensor) -> None:
        # On the host in double precision: one row for each element.
        piece = piece.to("cpu")
        is_complex = piece.is_complex()
        real = torch.view_as_real(piece.resolve_conj()) if is_complex else piece.resolve_neg()
        values = real.to(torch.float64).reshape(piece.numel(), -1)
        finite = values.isfinite()
        masks = {"zero_count": (values == 0).all(-1), "negative_count": (values < 0).any(-1)}
        if not finite.all():
            masks["nan_count"] = nan = values.isnan().any(-1)
            masks["pos_inf_count"] = above = (values == math.inf).any(-1) & ~nan
            masks["neg_inf_count"] = (values == -math.inf).any(-1) & ~nan & ~above
            if self.first_bad is None:
                bad = finite.all(-1).logical_not().to(torch.uint8).argmax()
                index = [int(number) for number in torch.unravel_index(bad, piece.shape)]
                padded = [0] * (len(start) - len(index)) + index
                self.first_bad = tuple(map(sum, zip(start, padded, strict=True)))
            values = values[finite]
        self.counts.update({kind: int(mask.sum()) for kind, mask in masks.items()})
        if values.numel():
            self._add_finite(values)

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


def _in_tensor(
    tensor: Tensor, parts: list[Tensor], index: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The index into the tensor of an index into its only part, if the two can be matched."""
    if index is None or len(parts) != 1:
        return None
    if tensor.layout is torch.sparse_coo:
        return (*tensor._indices()[:, index[0]].tolist(), *index[1:])
    return index if parts[0].shape == tensor.shape else None
