"""How a bad step of ours is tried once more."""

from __future__ import annotations

from typing import Literal

from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy


def next_try(
    strategy: RecoveryStrategy, config: RecoveryConfig, tries: int
) -> Literal["clip", "again"] | None:
    """How the calls are run once more after so many tries; None: they are left out."""
    if strategy is RecoveryStrategy.REWIND:
        return None
    if strategy is RecoveryStrategy.CLIP_GRADIENTS:
        return "clip"
    if config.skip_batch_after_nan:
        return None
    return None if strategy is RecoveryStrategy.SKIP_STEP and tries else "again"
