"""From what was seen to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stayfinite.prevent.data.extremes import outliers
from stayfinite.prevent.data.findings import DataFinding, TensorProfile
from stayfinite.prevent.data.inspection import Case, Inspection, parted
from stayfinite.prevent.data.judgement import Judgement
from stayfinite.prevent.data.leaves import ROOT
from stayfinite.prevent.data.outliers import usual_size
from stayfinite.prevent.data.scale import scale, unvarying
from stayfinite.prevent.data.sights import Kind
from stayfinite.prevent.data.tally import Tally
from stayfinite.prevent.data.wording import WORDS, Said, of
from stayfinite.prevent.risks import ranked

_MOST_PLACES = 100

IndicesOf = Callable[[Kind, str, Sequence[int]], tuple[Any, ...]]
"""The dataset indices of places where something of that kind was seen in that tensor."""

JUDGES: tuple[Callable[[Inspection, Tally], Iterator[Judgement]], ...] = (
    outliers,
    scale,
    unvarying,
)


def findings_of(inspection: Inspection, indices_of: IndicesOf) -> list[DataFinding]:
    """Everything that was found, the worst first."""
    found = []
    for (kind, path), case in _cases(inspection).items():
        said = WORDS[kind](inspection, path, case)
        found.append(finding(kind, path, said, case.places, indices_of))
    for path, tally in inspection.tallies.items():
        if tally.dtype.startswith("float"):
            for each in (each for judge in JUDGES for each in judge(inspection, tally)):
                found.append(finding(each.kind, path, each.said, each.places, indices_of))
    found += [finding("single", ROOT, said, (), indices_of) for said in _single(inspection)]
    return [each for each in ranked(found) if isinstance(each, DataFinding)]


def finding(
    kind: Kind, path: str, said: Said, places: Sequence[int], indices_of: IndicesOf
) -> DataFinding:
    return DataFinding(
        kind=kind,
        level=said.level,
        what=said.what,
        where=path,
        fix=said.fix,
        cause=said.cause,
        evidence=said.evidence,
        score=float(len(places)),
        rows=len(places),
        indices=indices_of(kind, path, places),
        places=tuple(map(parted, places[:_MOST_PLACES])),
    )


def _cases(inspection: Inspection) -> dict[tuple[Kind, str], Case]:
    """What was seen in rows, and the masks about which only all batches tell."""
    cases = dict(inspection.cases)
    for path, padding in inspection.padding.items():
        if padding.hidden:
            case = Case()
            case.places.extend(padding.hidden)
            case.counts["rows"] = len(padding.hidden)
            cases["masked", path] = case
    return cases


def _single(inspection: Inspection) -> Iterator[Said]:
    """Batches of one sample, with which BatchNorm cannot do anything."""
    ones, batches = inspection.sizes[1], inspection.batches
    if ones:
        yield Said(
            level="low",
            what=f"{of(ones, batches, 'batch', 'batches')} {'has' if ones == 1 else 'have'} only "
            "one sample: BatchNorm has no variance to divide by.",
            fix="`DataLoader(..., drop_last=True)`, or GroupNorm or LayerNorm.",
            cause="batchnorm_degenerate",
            evidence={"batches": ones},
        )


def profiles(inspection: Inspection) -> tuple[TensorProfile, ...]:
    """What each tensor of the batches is like."""
    return tuple(_profile(tally, inspection) for tally in inspection.tallies.values())


def _profile(tally: Tally, inspection: Inspection) -> TensorProfile:
    moments = tally.moments.pooled()
    is_known = bool(moments.count > 0)
    return TensorProfile(
        path=tally.path,
        role=inspection.roles[tally.path].value,
        dtype=tally.dtype,
        shape=tally.shape,
        rows=tally.rows,
        min=tally.lowest if is_known else None,
        max=tally.highest if is_known else None,
        mean=float(moments.mean) if is_known else None,
        std=float(moments.std) if is_known else None,
        usual=usual_size(tally.elements),
    )
