"""A capsule put together from what a guard has kept of a bad step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stayfinite.capsule import limits
from stayfinite.capsule.contents import Birth, Operation
from stayfinite.checkpoint.format.values import encode
from stayfinite.detect.walk import children, is_container, named_tensors
from stayfinite.errors import CapsuleError, CheckpointError
from stayfinite.explain.causes import CAUSES
from stayfinite.locate.keeping import Kept, KeptCall, described
from stayfinite.records import Incident
from stayfinite.report.html.confidential import without_source

Redact = Callable[[Any], Any]


def birth_of(kept: Kept | None, *, with_data: bool) -> Birth | None:
    """The guilty operation; of tensors that may come from data only statistics, unless wanted."""
    if kept is None:
        return None
    forward = None if kept.forward is None else _operation(kept.forward, with_data)
    return Birth(
        operation=_operation(kept.call, with_data), nan_type=kept.nan_type, forward=forward
    )


def _operation(call: KeptCall, with_data: bool) -> Operation:
    arguments = {
        name: _shown(name, value, with_data or name in call.open)
        for name, value in call.arguments.items()
        if _can_be_stored(value)
    }
    return Operation(op=call.op, arguments=arguments)


def _shown(name: str, value: Any, is_shown: bool) -> Any:
    if isinstance(value, list):
        return [_shown(f"{name}[{number}]", item, is_shown) for number, item in enumerate(value)]
    return value if is_shown or not isinstance(value, Tensor) else described(name, value)


def _can_be_stored(value: Any) -> bool:
    """Layouts, memory formats, devices and generators are left to their defaults."""
    left_out = (torch.layout, torch.memory_format, torch.device, torch.Generator)
    return not isinstance(value, left_out)


def batch_of(
    batch: tuple[Any, ...], *, with_batch: bool, redact: Redact | None
) -> tuple[tuple[Any, ...], str | None]:
    """What goes into the capsule of the batch, and a note if that is not all of it."""
    if not with_batch:
        return (), "the batch is not in it: that needs consent (with_batch)"
    if redact is not None:
        batch = tuple(redact(each) for each in batch)
    size = batch_size(batch)
    if size > limits.BATCH:
        return (), f"the batch has {size:,} bytes, and is not in it: {limits.BATCH:,} are possible"
    batch = tuple(copied(each) for each in batch)
    try:
        encode(batch, "batch", {})
    except CheckpointError as error:
        return (), f"the batch is not in it: {error}"
    return batch, None


def batch_size(batch: tuple[Any, ...]) -> int:
    """Bytes of the tensors in it."""
    return sum(tensor.nbytes for _, tensor in named_tensors(batch, "batch"))


def copied(value: Any) -> Any:
    """The value with its own tensors, on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    if is_container(value) and (isinstance(value, dict) or hasattr(value, "keys")):
        return {key: copied(item) for key, item in children(value)}
    return value


def told(incident: Incident, *, with_source: bool) -> Incident:
    """The incident as the capsule tells it: without source it quotes no line, but says which."""
    if with_source or incident.origin is None:
        return incident
    origin, quiet = incident.origin, without_source(incident, CAUSES)
    assert quiet.origin is not None
    known = replace(quiet.origin, file=origin.file, line=origin.line, end_line=origin.end_line)
    return replace(quiet, origin=known)


def check_redaction(redact: Redact | None, *, with_batch: bool) -> None:
    """A redaction that would not be used is a misunderstanding."""
    if redact is not None and not with_batch:
        raise CapsuleError("redact is for the batch, which is only in it with with_batch=True.")
