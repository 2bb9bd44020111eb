"""From what was seen to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from stayfinite.prevent.data.extremes import outliers
from stayfinite.prevent.data.findings import DataFinding, TensorProfile
from stayfinite.prevent.data.inspection import Case, Inspection, Key, parted
from stayfinite.prevent.data.judgement import Judgement
from stayfinite.prevent.data.leaves import ROOT
from stayfinite.prevent.data.outliers import usual_size
from stayfinite.prevent.data.scale import scale, unvarying
from stayfinite.prevent.data.tally import Tally
from stayfinite.prevent.data.wording import WORDS, Said, of
from stayfinite.prevent.risks import LEVELS

_MOST_PLACES = 100

JUDGES: tuple[Callable[[Inspection, Tally], Iterator[Judgement]], ...] = (
    outliers,
    scale,
    unvarying,
)


def judgements(inspection: Inspection) -> list[Judgement]:
    """Everything there is to say, the worst first."""
    inspection.settle()
    said = [*_about_rows(inspection), *_about_tensors(inspection), *_about_sizes(inspection)]
    return sorted(said, key=lambda each: (LEVELS.index(each.said.level), -len(each.places)))


def findings(
    said: Iterable[Judgement], indices: Mapping[Key, tuple[Any, ...]]
) -> Iterator[DataFinding]:
    """The same as records, with the dataset indices of each."""
    for each in said:
        yield DataFinding(
            kind=each.kind,
            level=each.said.level,
            what=each.said.what,
            where=each.path,
            fix=each.said.fix,
            cause=each.said.cause,
            evidence=each.said.evidence,
            score=float(len(each.places)),
            rows=len(each.places),
            indices=indices.get((each.kind, each.path), ()),
            places=tuple(map(parted, each.places[:_MOST_PLACES])),
        )


def _about_rows(inspection: Inspection) -> Iterator[Judgement]:
    for (kind, path), case in _cases(inspection).items():
        said = WORDS[kind](inspection, path, case)
        yield Judgement(kind=kind, path=path, said=said, places=case.places)


def _about_tensors(inspection: Inspection) -> Iterator[Judgement]:
    for tally in inspection.tallies.values():
        if tally.dtype.startswith("float"):
            for judge in JUDGES:
                yield from judge(inspection, tally)


def _cases(inspection: Inspection) -> dict[Key, Case]:
    """What was seen in rows, and the masks about which only all batches tell."""
    cases = dict(inspection.cases)
    for path, padding in inspection.padding.items():
        if padding.hidden:
            case = Case()
            case.places.extend(padding.hidden)
            case.counts["rows"] = len(padding.hidden)
            cases["masked", path] = case
    return cases


def _about_sizes(inspection: Inspection) -> Iterator[Judgement]:
    """Batches of one sample, with which BatchNorm cannot do anything."""
    ones = inspection.sizes[1]
    if ones:
        said = Said(
            level="low",
            what=f"{of(ones, inspection.batches, 'batch', 'batches')} "
            f"{'has' if ones == 1 else 'have'} one sample: BatchNorm has no variance to divide by.",
            fix="`DataLoader(..., drop_last=True)`, or GroupNorm or LayerNorm.",
            cause="batchnorm_degenerate",
            evidence={"batches": ones},
        )
        yield Judgement(kind="single", path=ROOT, said=said)


def profiles(inspection: Inspection) -> tuple[TensorProfile, ...]:
    """What each tensor of the batches is like."""
    return tuple(_profile(tally, inspection) for tally in inspection.tallies.values())


def _profile(tally: Tally, inspection: Inspection) -> TensorProfile:
    moments = tally.moments.pooled()
    has_moments, has_range = bool(moments.count > 0), tally.lowest <= tally.highest
    return TensorProfile(
        path=tally.path,
        role=inspection.roles[tally.path].value,
        dtype=tally.dtype,
        shape=tally.shape,
        rows=tally.rows,
        min=tally.lowest if has_range else None,
        max=tally.highest if has_range else None,
        mean=float(moments.mean) if has_moments else None,
        std=float(moments.std) if has_moments else None,
        usual=usual_size(tally.elements),
    )
