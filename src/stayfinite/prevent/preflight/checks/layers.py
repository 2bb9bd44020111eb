"""What goes into layers: inputs in their own units, batches too small for BatchNorm."""

from __future__ import annotations

from stayfinite.prevent.preflight.checks.claim import Check, Claim, number
from stayfinite.prevent.preflight.use import Use

_FEW = 4
_LARGE = 100.0
_UNEVEN = 1000.0


def not_normalised(use: Use) -> Claim | None:
    """Data whose columns are large, or far apart in size, given to a layer as they are."""
    largest = use.facts.get("largest_column", 0.0)
    smallest = use.facts.get("smallest_column", 0.0)
    uneven = largest / smallest if smallest > 0 else 0.0
    if largest < _LARGE:
        return None
    apart = f", {number(uneven)} times its smallest" if uneven > _UNEVEN else ""
    return Claim(
        level="medium",
        cause="unnormalized_input",
        what=f"A layer gets data that was not normalised: its largest column is about "
        f"{number(largest)} in size{apart}.",
        score=1 - _LARGE / largest,
        evidence={"largest_column": largest, "smallest_column": smallest},
    )


def too_few_to_normalise(use: Use) -> Claim | None:
    """BatchNorm over a single sample, or a handful of values."""
    values, samples = use.facts.get("values", _FEW), use.facts.get("samples", 2)
    if values >= _FEW and samples > 1:
        return None
    return Claim(
        level="medium" if values < _FEW else "low",
        cause="batchnorm_degenerate",
        what=f"BatchNorm has {values} values for each channel, from {samples} "
        f"{'sample' if samples == 1 else 'samples'}; their variance says little, or is 0.",
        evidence={"values": values, "samples": samples},
    )


CHECKS: dict[str, tuple[Check, ...]] = {
    **dict.fromkeys(
        ("mm", "addmm", "bmm", "convolution", "mkldnn_convolution", "linear"), (not_normalised,)
    ),
    "native_batch_norm": (too_few_to_normalise,),
}
