"""Operators that a capsule may name: those that compute tensors from tensors, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stayfinite.capsule.contents import flat
from stayfinite.errors import CapsuleError

_NAME = re.compile(r"aten\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
# An operator may take a file name as well; these are the words that belong to arithmetic.
_WORDS = {"rounding_mode", "reduce", "reduction", "approximate", "UPLO", "driver", "ord", "mode"}
_TENSORS = ("Tensor", "List[Tensor]", "Optional[Tensor]", "List[Optional[Tensor]]")
_PLAIN = {"Tensor", "number", "int", "float", "bool", "str", "Device", "Generator"}
LARGEST_OUTPUT = 256 << 20


def operator(name: str) -> Any:
    """The operator with this name; CapsuleError for one that does more than arithmetic."""
    parts = _NAME.fullmatch(name)
    packet = getattr(torch.ops.aten, parts[1], None) if parts else None
    found = getattr(packet, parts[2], None) if parts and packet is not None else None
    if not isinstance(found, torch._ops.OpOverload):
        raise CapsuleError(f"{name[:80]!r} is no operator that can be run alone.")
    schema = found._schema
    plain = all(_is_plain(str(argument.type)) for argument in schema.arguments)
    takes = any(str(argument.type) in _TENSORS for argument in schema.arguments)
    gives = all(str(each.type) in _TENSORS for each in schema.returns)
    words = {argument.name for argument in schema.arguments if "str" in str(argument.type)}
    if not plain or not takes or not gives or words - _WORDS:
        raise CapsuleError(f"{name} does more than compute tensors from tensors; it is not run.")
    return found


def _is_plain(kind: str) -> bool:
    """Whether an argument of this type is a tensor, a number or a word, or a list of such."""
    inner = kind.removeprefix("Optional[").removeprefix("List[").removeprefix("Optional[")
    return inner.rstrip("]") in _PLAIN


def called(function: Any, arguments: Mapping[str, Any]) -> Any:
    """The operator's result; what it is not given has its default."""
    places = [each for each in function._schema.arguments if not each.kwarg_only]
    positional = []
    for each in places:
        if each.name not in arguments:
            break
        positional.append(arguments[each.name])
    taken = {each.name for each in places[: len(positional)]}
    rest = {name: value for name, value in arguments.items() if name not in taken}
    return function(*positional, **rest)


def check_output_size(function: Any, arguments: Mapping[str, Any]) -> None:
    """CapsuleError where the shapes say that the result would be huge."""
    try:
        out = called(function, {name: _without_values(each) for name, each in arguments.items()})
    except Exception:  # an operator without shapes of its own; its inputs are small
        return
    results = out if isinstance(out, (list, tuple)) else [out]
    size = sum(each.nbytes for each in flat(results) if isinstance(each, Tensor))
    if size > LARGEST_OUTPUT:
        raise CapsuleError(f"the operation would give {size:,} bytes; it is not run.")


def _without_values(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta")
    return [_without_values(item) for item in value] if isinstance(value, list) else value
