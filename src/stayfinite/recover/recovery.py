"""What was done about one bad step."""

from __future__ import annotations

from dataclasses import dataclass

from stayfinite.recover.config import RecoveryStrategy


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What was done about one bad step.

    `tried` are the strategies that could not help, each with its reason. `lr`, `scale` and
    `dtype` (the lowest of the parameters) are as they were found; None where there is none.
    """

    step: int
    location: str
    strategy: RecoveryStrategy
    succeeded: bool
    detail: str = ""
    tried: tuple[tuple[RecoveryStrategy, str], ...] = ()
    cause: str | None = None
    module: str | None = None
    lr: float | None = None
    scale: float | None = None
    dtype: str | None = None
