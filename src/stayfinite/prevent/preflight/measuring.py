"""What the checks must know of tensors while they are there: rows under a mask, labels, lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stayfinite.detect.parts import undisturbed
from stayfinite.locate.storages import covers_storage

Facts = dict[str, Any]
_LARGE_MATRIX, _SOME = 256, 64


@undisturbed
def chance_of_none(kept: Tensor) -> float:
    """How likely a batch like this one keeps nothing at all.

    The first dimension counts samples, taken as independent: with k of n keeping something, a
    sample keeps nothing with chance (n - k + 1) / (n + 2), and all of them with that to the n.
    """
    flags = kept.detach() != 0
    keeping = flags.flatten(1).any(1) if flags.dim() > 1 else flags.reshape(-1)
    return _chance(len(keeping), int(keeping.sum()))


def _chance(samples: int, keeping: int) -> float:
    return float(((samples - keeping + 1) / (samples + 2)) ** samples)


def _chance_in_row(kept: Tensor) -> float:
    """The same for labels in one long row, where each unbroken run comes from one sample."""
    row = kept.reshape(-1).to(torch.int8)
    runs = int(row[0]) + int((row[1:] > row[:-1]).sum())
    return _chance(runs, runs) if runs else 1.0


@undisturbed
def is_zero_or_one(tensor: Tensor) -> bool:
    """Whether it can be a mask: only 0 and 1 in it."""
    if tensor.dtype is torch.bool:
        return True
    if tensor.is_complex() or not tensor.numel():
        return False
    return bool(((tensor == 0) | (tensor == 1)).all())


def rows_under_mask(args: Sequence[Any]) -> Facts:
    """How much a mask of -Inf leaves of the rows that a softmax runs over."""
    scores, dims = args[0], args[1]
    dim = dims[0] if isinstance(dims, (list, tuple)) and dims else dims
    if not isinstance(dim, int) or scores.dim() == 0 or not scores.is_floating_point():
        return {}
    kept = scores != -math.inf
    if bool(kept.all()):
        return {}
    rows = kept.movedim(dim, -1).reshape(-1, scores.shape[dim])
    left = rows.sum(-1)
    return {
        "rows": len(rows),
        "least_left": int(left.min()),
        "covered": int((left == 0).sum()),
        "has_anchor": bool(rows.all(0).any()),
    }


def ignored_labels(args: Sequence[Any]) -> Facts:
    """How many labels of a cross-entropy that takes the mean are ignored."""
    target, reduction, ignored = args[1], args[3], args[4]
    kept = target != ignored
    if reduction != 1 or bool(kept.all()) or not kept.numel():
        return {}
    chance = _chance_in_row(kept) if kept.dim() == 1 else chance_of_none(kept)
    return {"kept": int(kept.sum()), "labels": target.numel(), "chance": chance}


def ctc_lengths(args: Sequence[Any]) -> Facts:
    """Whether longer targets, or ones with more repeats, still fit their inputs."""
    lengths, targets = _ints(args[2]), _ints(args[3])
    if not lengths or not targets:
        return {}
    zero_infinity = bool(args[5]) if len(args) > 5 else False
    return {
        "shortest_input": min(lengths),
        "longest_target": max(targets),
        "zero_infinity": zero_infinity,
    }


def _ints(value: Any) -> list[int]:
    values = value.tolist() if isinstance(value, Tensor) else list(value)
    return [int(v) for v in values]


def reduced(args: Sequence[Any]) -> Facts:
    """Over how many elements a variance is taken."""
    values, dims = args[0], args[1] if len(args) > 1 else None
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = [dims]
    if not isinstance(dims, (list, tuple)) or not dims:
        dims = range(values.dim())
    return {
        "elements": math.prod(values.shape[dim] for dim in dims),
        "dims": values.dim(),
        "is_part": not covers_storage(values),
    }


def columns(args: Sequence[Any]) -> Facts:
    """The sizes of the columns that go into a layer."""
    values = next((a for a in args if isinstance(a, Tensor) and a.dim() >= 2), None)
    if values is None or not values.is_floating_point() or not values.numel():
        return {}
    table = values.movedim(1, -1).reshape(-1, values.shape[1]).double()
    rms = torch.nan_to_num(table, posinf=0.0, neginf=0.0).square().mean(0).sqrt()
    return {"largest_column": float(rms.max()), "smallest_column": float(rms.min())}


def per_channel(args: Sequence[Any]) -> Facts:
    """Over how many values each channel of a batch norm is normalised."""
    values, is_training = args[0], args[5]
    if not is_training:
        return {}
    return {"values": values.numel() // values.shape[1], "samples": len(values)}


def condition(args: Sequence[Any]) -> Facts:
    """How far the matrices are from singular ones; nothing for large ones."""
    values = args[0]
    if values.dim() < 2 or max(values.shape[-2:]) > _LARGE_MATRIX or not values.numel():
        return {}
    singular = torch.linalg.svdvals(values.reshape(-1, *values.shape[-2:])[:_SOME].double())
    ratios = singular[:, 0] / singular[:, -1].clamp_min(1e-300)
    return {"condition": float(ratios.max())}


MEASURES: dict[str, Callable[[Sequence[Any]], Facts]] = {
    "_softmax": rows_under_mask,
    "_log_softmax": rows_under_mask,
    "logsumexp": rows_under_mask,
    "nll_loss_forward": ignored_labels,
    "nll_loss2d_forward": ignored_labels,
    "_ctc_loss": ctc_lengths,
    **dict.fromkeys(
        ("linalg_inv_ex", "linalg_cholesky_ex", "_linalg_solve_ex", "_linalg_slogdet"), condition
    ),
    "layer": columns,
    "native_batch_norm": per_channel,
    "std": reduced,
    "var": reduced,
    "std_mean": reduced,
    "var_mean": reduced,
}


@undisturbed
def measure(name: str, args: Sequence[Any]) -> Facts:
    """The facts that the checks of this operation ask for."""
    take = MEASURES.get(name)
    return take(args) if take is not None else {}
