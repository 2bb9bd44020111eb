"""float16: values near its end, and constants beyond it."""

from __future__ import annotations

import math

from stayfinite.prevent.preflight.checks.claim import Claim, number
from stayfinite.prevent.preflight.heights import HIGHEST, Height
from stayfinite.prevent.risks import Level

_LITTLE = 2.0  # doublings
_SOME = 4.0


def half_claim(height: Height) -> Claim | None:
    """What is risky about the float16 values of one line."""
    if height.too_large is not None:
        return Claim(
            level="medium",
            cause="mask_value_overflow",
            what=f"{number(height.too_large)} is {'-' if height.too_large < 0 else ''}Inf in "
            "float16; a row that is masked everywhere is NaN then.",
            evidence={"constant": height.too_large},
        )
    if not math.isfinite(height.size) or height.headroom >= _SOME:
        return None
    level: Level = "medium" if height.headroom < _LITTLE else "low"
    return Claim(
        level=level,
        cause="low_precision_overflow",
        what=f"The values here reach {number(height.size)} in float16, which ends at "
        f"{HIGHEST:g}: {height.headroom:.1f} doublings are left.",
        score=1 - height.headroom / _SOME,
        evidence={"largest": height.size, "headroom_bits": height.headroom},
    )
