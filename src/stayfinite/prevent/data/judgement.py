"""What is said about a tensor of the batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stayfinite.prevent.data.sights import Kind
from stayfinite.prevent.data.wording import Said

_SHOWN = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class Judgement:
    """Something to say about a tensor, and the places of the rows that it is about, if any."""

    kind: Kind
    path: str
    said: Said
    places: Sequence[int] = ()


def named_columns(numbers: Sequence[int], name: str = "column") -> str:
    """Such as "columns 3, 5 and 7", and no more than a reader wants."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN:,} more" if len(numbers) > _SHOWN else ""
    return f"{name if len(numbers) == 1 else f'{name}s'} {shown}{more}"
