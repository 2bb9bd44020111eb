"""What a caller lets pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How strict a check is; the sequences are patterns of tensor names."""

    strict: bool = True
    ignore: Sequence[str] = ()
    nonfinite_ok: Sequence[str] = ()


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is meant by any pattern, such as "*.last_attention"."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
