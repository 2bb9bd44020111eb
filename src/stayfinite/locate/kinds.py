"""What one operation did: which tensors it wrote, what it read, and how badness came about."""

from __future__ import annotations

import dis
import linecache
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from stayfinite.locate.ops import Call, named_tensors, nonfinite_constants, tensors_in
from stayfinite.locate.source import Place
from stayfinite.records import HopKind, NaNType, TensorSummary

Named = tuple[str, Tensor]
_STORE_ITEM = dis.opmap["STORE_SUBSCR"]  # x[...] = value


def holds(tensors: Iterable[Tensor], tensor: Tensor) -> bool:
    """Whether this very tensor is among them."""
    return any(tensor is other for other in tensors)


def written_by(call: Call) -> tuple[Tensor, ...]:
    """The arguments that the operation writes into."""
    info = call.info
    if not info.written:
        return ()
    values = [call.args[i] for i in info.written if i < len(call.args)]
    values += [call.kwargs[name] for name in info.written_names if name in call.kwargs]
    return tuple(tensors_in(values))


def read_for(call: Call, bad: Tensor, written: tuple[Tensor, ...]) -> list[Named]:
    """What the bad output was computed from: of a foreach list only the members beside it."""
    given = named_tensors(call)
    if call.info.overwrites:
        given = [(name, tensor) for name, tensor in given if not holds(written, tensor)]
    if not call.info.base.startswith(("_foreach_", "_fused_")):
        return given
    index = next((name.rpartition("[")[2] for name, tensor in given if tensor is bad), None)
    if index is None:
        return given
    return [pair for pair in given if not pair[0].endswith("]") or pair[0].endswith(f"[{index}")]


def kind_of_event(
    call: Call, nan_type: NaNType, input_types: set[NaNType], place: Place | None
) -> HopKind:
    """birth, conversion (Inf in, NaN out), spread, or constant (somebody wrote the Inf)."""
    if input_types:
        is_new = nan_type is NaNType.NAN and NaNType.NAN not in input_types
        return "conversion" if is_new else "spread"
    constants = nonfinite_constants(call)
    if nan_type is NaNType.NAN and call.info.base == "scalar_tensor" and not _says(place, "nan"):
        return "birth"  # torch itself answers so, as logdet does where it is not defined
    if constants and call.info.fills:
        is_nan_meant = call.info.base.startswith(("full", "fill", "masked", "new_full", "scalar"))
        if nan_type is not NaNType.NAN or (is_nan_meant and any(c != c for c in constants)):
            return "constant"
    return "birth"


def is_meant(summary: TensorSummary, place: Place | None) -> bool:
    """Whether a bad value that no operation made is there on purpose: a mask, or x[...] = -inf."""
    if _is_mask(summary):
        return True
    if summary.shape or summary.nan_count or place is None:
        return False
    return place.code.co_code[place.lasti] == _STORE_ITEM or _says(place, "inf")


def _says(place: Place | None, word: str) -> bool:
    """Whether the line has the word."""
    if place is None:
        return False
    return word in linecache.getline(place.code.co_filename, place.line).lower()


def _is_mask(summary: TensorSummary) -> bool:
    """Whether it holds 0 and -Inf and nothing else, as a mask that is added to scores does."""
    zeros, infs = summary.zero_count, summary.neg_inf_count
    return zeros > 0 and infs > 0 and zeros + infs == summary.numel


def wait_for(out: Any) -> None:
    """Let a collective finish: it returns before its data has arrived."""
    work: Any = out[-1] if isinstance(out, (list, tuple)) and out else None
    if hasattr(work, "wait"):
        work.wait()
