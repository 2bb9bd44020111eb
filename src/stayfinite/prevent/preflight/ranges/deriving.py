"""What the result of an operation can be, from what its inputs can be."""

from __future__ import annotations

import torch
from torch import Tensor

from stayfinite.prevent.preflight.ranges.bounds import ANY, INF, Bounds, hull
from stayfinite.prevent.preflight.ranges.operation import Operation
from stayfinite.prevent.preflight.ranges.reach import Open, Reach, why_open
from stayfinite.prevent.preflight.ranges.seen import bounds_now
from stayfinite.prevent.preflight.ranges.table import bounds_of
from stayfinite.prevent.preflight.ranges.words import words

_LAYERS = words(
    """mm bmm mv dot addmm baddbmm addmv linear convolution mkldnn_convolution native_layer_norm
    native_batch_norm native_group_norm cudnn_batch_norm mkldnn_rnn_layer embedding _embedding_bag
    _scaled_dot_product_flash_attention_for_cpu _fused_rms_norm"""
)
_DRAWN = words(
    """randn randn_like normal uniform rand rand_like bernoulli randint randint_like randperm
    multinomial exponential poisson random native_dropout cauchy geometric log_normal"""
)
# No formula knows more of them than that they are what they are.
_TAKEN_AS_SEEN = words("randn randn_like normal exponential poisson log_normal cauchy")
_COUNTS = words("sum bincount")
_PEAKS = words("amax max scatter_reduce cummax topk")
_LOGS = words("_log_softmax log_sigmoid_forward log logsumexp")


def derived(op: Operation, parents: tuple[Reach, ...], out: Tensor) -> Reach:
    """The reach of one output."""
    reach = Reach(
        learned=any(parent.learned for parent in parents),
        fed=op.base in _DRAWN or any(parent.fed for parent in parents),
        frozen=any(parent.frozen for parent in parents),
        op=op.base,
        made_from=parents,
        is_index=not (out.is_floating_point() or out.is_complex()) and out.dtype is not torch.bool,
    )
    reach.bounds = _bounds(op, parents, out)
    _relate(op, reach)
    if reach.is_open:
        reach.open = _reason(op, reach)
    _guard(op, reach)
    if op.per_output <= 1:
        reach.chance = max((p.chance for p in parents if p.chance is not None), default=None)
    return reach


def joined(old: Reach, new: Reach) -> Reach:
    """Memory of which a part was written anew."""
    return Reach(
        bounds=hull(old.bounds, new.bounds),
        learned=old.learned or new.learned,
        fed=old.fed or new.fed,
        frozen=old.frozen or new.frozen,
        op=new.op,
        made_from=(*new.made_from, old),
        open=new.open or old.open,
        is_index=new.is_index,
    )


def leaf(tensor: Tensor, *, fed: bool) -> Reach:
    """A tensor that no operation made here: data, or a constant."""
    is_index = not (tensor.is_floating_point() or tensor.is_complex())
    return Reach(
        bounds=bounds_now(tensor),
        fed=fed,
        op="data" if fed else "constant",
        is_index=is_index and tensor.dtype is not torch.bool,
    )


def parameter(tensor: Tensor) -> Reach:
    if tensor.requires_grad:
        return Reach(learned=True, op="parameter", open="parameter")
    return Reach(bounds=bounds_now(tensor), frozen=True, op="parameter")


def _bounds(op: Operation, parents: tuple[Reach, ...], out: Tensor) -> Bounds:
    is_number = out.is_floating_point() or out.is_complex()
    if out.is_complex():
        return ANY
    is_taken = op.base in _TAKEN_AS_SEEN or (not parents and op.base != "rand")
    if is_taken or not (is_number or op.base in _COUNTS):
        return bounds_now(out)
    if op.base == "uniform":
        return Bounds(op.number(1, "from") or 0.0, op.number(2, "to") or 1.0)
    return bounds_of(op)


def _relate(op: Operation, reach: Reach) -> None:
    """What holds because two inputs belong together: x - max(x), max(x) - min(x)."""
    first = op.args[0] if op.args else None
    second = op.args[1] if len(op.args) > 1 else None
    if op.base == "sub" and isinstance(first, Reach) and isinstance(second, Reach):
        _relate_difference(first, second, reach)
    elif isinstance(first, Reach) and first.peaks and op.base in ("exp", "index", "gather"):
        reach.peaks = True
    elif op.base in ("index_add", "scatter_add"):
        reach.peaks = any(parent.peaks for parent in reach.made_from)


def _relate_difference(first: Reach, second: Reach, reach: Reach) -> None:
    for back in second.ancestors(4):
        if back.op in _PEAKS and back.comes_from(first, within=3):
            reach.bounds, reach.peaks = Bounds(-INF, 0.0), True
        elif back.op == "logsumexp" and back.comes_from(first, within=1):
            reach.bounds, reach.open = Bounds(-INF, 0.0), "log"
    if _is_extreme(first, "amax", "max") and _is_extreme(second, "amin", "min"):
        source = first.made_from[0]
        if second.made_from[0] is source:
            reach.bounds = Bounds(0.0, reach.bounds.high)


def _is_extreme(reach: Reach, *names: str) -> bool:
    return reach.op in names and len(reach.made_from) == 1


def _reason(op: Operation, reach: Reach) -> Open:
    if reach.open is not None:
        return reach.open
    if op.base in _LAYERS and reach.learned:
        return "layer"
    if op.base in _LOGS and reach.bounds.high < INF:
        return "log"
    inherited = why_open(reach.made_from)
    if inherited is not None:
        return inherited
    if op.base in ("div", "reciprocal"):
        return "ratio"
    return "other" if reach.learned else "data"


def _guard(op: Operation, reach: Reach) -> None:
    """torch.where(x > 0, x, 1): somebody chose the values of x by a look at x."""
    if op.base in ("where", "masked_fill") and len(op.args) > 1:
        condition = op.args[0] if op.base == "where" else op.args[1]
        values = [v for v in op.args if isinstance(v, Reach) and v is not condition]
        reach.guarded = isinstance(condition, Reach) and any(
            condition.comes_from(value, within=6) for value in values
        )
    elif len(reach.made_from) == 1:
        parent = reach.made_from[0]
        reach.guarded = parent.guarded and parent.bounds == reach.bounds
