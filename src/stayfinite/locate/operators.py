"""What one aten operator does: what it reads and writes, and how its result came to be bad."""

from __future__ import annotations

import dis
import linecache
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stayfinite.detect.finite import all_finite
from stayfinite.detect.memory import local
from stayfinite.locate.source import Place
from stayfinite.records import HopKind, NaNType, TensorSummary

# Memory that nobody has written yet: whatever is in it was not computed.
_ALLOCATORS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
# A non-finite constant given to one of these is meant.
_FILLS = {
    "full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where",
    "scalar_tensor", "constant_pad_nd", "index_fill", "index_fill_", "index_put", "index_put_",
    "clamp", "clamp_", "clamp_min", "clamp_max", "nan_to_num", "nan_to_num_", "add", "add_", "sub",
    "mul", "mul_",
}  # fmt: skip
# They only point at other memory.
_ADOPTERS = {"set_", "lift", "alias", "_reshape_alias"}
# In place, but the old content is not read.
_OVERWRITES = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
    "log_normal_", "cauchy_", "geometric_", "resize_",
}  # fmt: skip
# Whatever else they are given: of a finite first argument they make nothing non-finite.
_KEEPERS = {
    "relu", "relu_", "threshold_backward", "max_pool2d_with_indices", "clone", "gelu", "silu",
    "sigmoid", "tanh", "hardtanh", "_softmax",
}  # fmt: skip


class OpInfo(NamedTuple):
    """name, what it writes, and whether its output needs a look."""

    name: str
    base: str
    arguments: tuple[str, ...]
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    overwrites: bool
    is_view: bool
    allocates: bool
    fills: bool
    keeps_finite: bool
    is_collective: bool


class Call(NamedTuple):
    """One run of an operator."""

    info: OpInfo
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def named(self) -> list[tuple[str, Any]]:
        """The arguments with the schema's names."""
        return [*zip(self.info.arguments, self.args, strict=False), *self.kwargs.items()]


class OpInfos:
    """The facts about each operator that was asked for, learned once."""

    def __init__(self) -> None:
        # By the number of the operator, which the value keeps alive: its own hash takes long.
        self._known: dict[int, tuple[OpInfo, Any]] = {}

    def of(self, func: Any) -> OpInfo:
        known = self._known.get(id(func))
        if known is None:
            known = self._known[id(func)] = learn(func), func
        return known[0]


def learn(func: Any) -> OpInfo:
    """The facts about an operator."""
    schema = func._schema
    base = schema.name.split("::")[-1]
    written = [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    out_variant = "out" in func._overloadname or any(name == "out" for _, name in written)
    aliases = any(
        ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns
    )
    return OpInfo(
        name=str(func),
        base=base,
        arguments=tuple(argument.name for argument in schema.arguments),
        written=tuple(index for index, _ in written),
        written_names=tuple(name for _, name in written),
        overwrites=out_variant or base in _OVERWRITES,
        is_view=base in _ADOPTERS
        or ((bool(getattr(func, "is_view", False)) or aliases) and not written),
        allocates=base in _ALLOCATORS,
        fills=base in _FILLS,
        keeps_finite=base in _KEEPERS and func.namespace == "aten",
        is_collective=func.namespace in ("c10d", "_c10d_functional", "c10d_functional"),
    )


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among operator arguments or results; lists are opened."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, Tensor):
                found.append(item)
            elif isinstance(item, (list, tuple)):
                found += tensors_in(item)
    return found


def named_tensors(call: Call) -> list[tuple[str, Tensor]]:
    """Tensor arguments with their names; list members get an index."""
    found: list[tuple[str, Tensor]] = []
    for name, value in call.named():
        if isinstance(value, Tensor):
            found.append((name, value))
        else:
            members = enumerate(tensors_in(value))
            found.extend((f"{name}[{index}]", tensor) for index, tensor in members)
    return found


def scalars(call: Call) -> dict[str, Any]:
    """The plain numbers, strings and short number lists among the arguments."""
    return {name: value for name, value in call.named() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= 8 and all(isinstance(item, (bool, int, float)) for item in value)
    return isinstance(value, (bool, int, float, str))


def nonfinite_constants(call: Call) -> list[float]:
    """Inf and NaN that were given as Python numbers."""
    values = [*call.args, *call.kwargs.values()]
    return [v for v in values if isinstance(v, float) and not math.isfinite(v)]


def is_bad(tensor: Tensor) -> bool:
    """Whether any element is not finite; one pass, confirmed only when the sum overflows."""
    if type(tensor) not in _PLAIN:
        return _has_bad(local(tensor))
    if torch._C._len_torch_dispatch_stack():
        # Another mode, such as the one that protects a replay, need not hear what is read here.
        # Both are private; _disable_current_modes() takes many times as long.
        with torch._C._DisableTorchDispatch():
            return _has_bad(tensor)
    return _has_bad(tensor)


_PLAIN = (Tensor, nn.Parameter)


def _has_bad(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    if dtype is torch.float32 or dtype is torch.bfloat16 or dtype is torch.float64:
        try:
            if math.isfinite(tensor.sum().item()):  # host sync
                return False
        except RuntimeError:  # meta and fake tensors have no values
            pass
    elif not (dtype.is_floating_point or dtype.is_complex):
        return False
    return not all_finite([tensor])


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
    if "batch_norm" in call.info.base and _is_training(call):
        # It normalises by the batch: the running statistics are written, and read by nothing.
        given = [pair for pair in given if not pair[0].startswith("running_")]
    if call.info.overwrites:
        given = [(name, tensor) for name, tensor in given if not holds(written, tensor)]
    if not call.info.base.startswith(("_foreach_", "_fused_")):
        return given
    index = next((name.rpartition("[")[2] for name, tensor in given if tensor is bad), None)
    if index is None:
        return given
    return [pair for pair in given if not pair[0].endswith("]") or pair[0].endswith(f"[{index}")]


def _is_training(call: Call) -> bool:
    """Of a batch norm, forward or backward."""
    return any(value for name, value in call.named() if name in ("training", "train"))


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
