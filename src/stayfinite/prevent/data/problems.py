"""What check_data found, as records, text and JSON; and how what was seen is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor

from stayfinite.prevent.data.batch import ROOT, Leaf, Role
from stayfinite.prevent.data.inspection import Case, Inspection, Key, Kind, parted
from stayfinite.prevent.data.statistics import (
    FEWEST_ROWS,
    Ends,
    Limits,
    Tally,
    flat,
    limits_of,
    usual_size,
)
from stayfinite.prevent.risks import LEVELS, Level, Risk
from stayfinite.records import to_json

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class DataFinding(Risk):
    """One thing that is wrong with the data, in one tensor of the batches.

    `rows` says how many samples it is about, 0 if it is about all. `indices` are their indices in
    the dataset, all that are known for certain; `places` has batch and row of the first 100.
    """

    kind: Kind
    rows: int = 0
    indices: tuple[Any, ...] = ()
    places: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.what}{self._whose()}\n    {self.fix}"

    def _whose(self) -> str:
        if self.kind == "all_ignored":
            batches = list(dict.fromkeys(batch for batch, _ in self.places))
            return f" It is {_listed('batch', 'batches', batches)}."
        if self.indices:
            return f" Dataset {_listed('index', 'indices', self.indices)}."
        rows = [f"{row} of batch {batch}" for batch, row in self.places]
        return f" It is {_listed('row', 'rows', rows)}." if rows else ""


def _listed(one: str, many: str, items: Sequence[Any]) -> str:
    shown = ", ".join(str(item) for item in items[:_SHOWN])
    more = f", ... ({len(items):,} in all)" if len(items) > _SHOWN else ""
    return f"{one if len(items) == 1 else many} {shown}{more}"


@dataclass(frozen=True, kw_only=True)
class TensorProfile:
    """What one tensor of the batches is like; statistics are over finite values.

    `shape` is that of one row, None when it varies. `mean`, `std` and `usual`, the median size of
    what is not 0, are from a part of the elements where rows are long.
    """

    path: str
    role: str
    dtype: str
    shape: tuple[int, ...] | None
    rows: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    usual: float


@dataclass(frozen=True, kw_only=True)
class DataReport(Sequence[DataFinding]):
    """The findings, the worst first, and what was looked at. It is false when there are none."""

    findings: tuple[DataFinding, ...]
    batches: int
    rows: int
    tensors: tuple[TensorProfile, ...] = ()
    has_indices: bool = False

    @property
    def bad_indices(self) -> tuple[Any, ...]:
        """The dataset indices of all samples with a finding above low, in order."""
        return in_order(i for f in self.findings if f.is_warning for i in f.indices)

    @property
    def is_good(self) -> bool:
        """Whether nothing above low was found."""
        return not any(finding.is_warning for finding in self.findings)

    def to_json(self, *, indent: int | None = None) -> str:
        """The report as one strict JSON document."""
        return to_json(self, indent=indent)

    def __len__(self) -> int:
        return len(self.findings)

    @overload
    def __getitem__(self, place: int) -> DataFinding: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[DataFinding, ...]: ...

    def __getitem__(self, place: int | slice) -> DataFinding | tuple[DataFinding, ...]:
        return self.findings[place]

    def __iter__(self) -> Iterator[DataFinding]:
        return iter(self.findings)

    def __str__(self) -> str:
        seen = f"{self.rows:,} rows in {_count(self.batches, 'batch', 'batches')}"
        if not self.findings:
            return f"{seen}: nothing found."
        head = f"{seen}: {_count(len(self.findings), 'finding', 'findings')}"
        bad = f", {len(self.bad_indices):,} bad samples" if self.bad_indices else ""
        return "\n".join([f"{head}{bad}", *map(str, self.findings)])


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def in_order(items: Iterable[Any]) -> tuple[Any, ...]:
    """Each once, sorted if they can be."""
    found = dict.fromkeys(items)
    try:
        return tuple(sorted(found))
    except TypeError:  # keys of several types
        return tuple(found)


# Sizes at which a first layer of torch's default weights and an ordinary rate no longer get along.
_LARGE_COLUMN = 300.0
_LARGE = 100.0
_LARGE_TARGET = 1e4
_HUGE = 1e5
_TINY = 1e-6
# White is 255, but not every picture has a white spot.
_PIXELS = (100.0, 255.0)
_HARDLY = 1e-6


def scale(inspection: Inspection, tally: Tally) -> Iterator[Judgement]:
    """Values that are large or tiny throughout."""
    role = inspection.roles[tally.path]
    if role not in (Role.INPUT, Role.TARGET) or tally.elements.numel() < FEWEST_ROWS:
        return
    usual = usual_size(tally.elements)
    columns = _large_columns(tally)
    if role is Role.TARGET:
        if usual >= _LARGE_TARGET:
            yield _large_target(tally, usual)
    elif columns:
        largest = max(columns.values())
        yield _large(
            tally, largest, f"About {largest:.3g} is usual in {named_columns([*columns])}."
        )
    elif tally.columns is None and _are_pixels(tally):
        yield _large(tally, usual, f"These look like pixels from 0 to {tally.highest:.0f}.")
    elif tally.columns is None and usual >= _LARGE:
        yield _large(tally, usual, f"The values are about {usual:.3g} in size.")
    elif 0 < usual < _TINY:
        yield _tiny(tally, usual)


def _large(tally: Tally, usual: float, what: str) -> Judgement:
    said = Said(
        level="high" if usual >= _HUGE else "medium",
        what=f"{what} Activations and gradients grow by that factor.",
        fix="Standardise with the statistics of the training set, "
        "`(x - mean) / std.clamp_min(1e-6)`; pixels, `x / 255`.",
        cause="unnormalized_input",
        evidence={"usual": usual},
    )
    return Judgement(kind="scale", path=tally.path, said=said)


def _large_target(tally: Tally, usual: float) -> Judgement:
    said = Said(
        level="medium",
        what=f"The targets are about {usual:.3g} in size, a squared error {usual**2:.1g}.",
        fix="Predict `(y - mean) / std`, or `torch.log1p(y)` of amounts.",
        cause="unnormalized_input",
        evidence={"usual": usual},
    )
    return Judgement(kind="scale", path=tally.path, said=said)


def _tiny(tally: Tally, usual: float) -> Judgement:
    said = Said(
        level="low",
        what=f"The values are about {usual:.3g} in size, less than the eps of a normalisation.",
        fix="Standardise them: `(x - mean) / std`.",
        cause="low_precision_underflow",
        evidence={"usual": usual},
    )
    return Judgement(kind="scale", path=tally.path, said=said)


def _large_columns(tally: Tally) -> dict[int, float]:
    if tally.columns is None:
        return {}
    sizes = tally.elements.abs()
    usual = torch.where(sizes > 0, sizes, torch.nan).nanmedian(0).values
    large = (usual >= _LARGE_COLUMN).nonzero().flatten().tolist()
    return {column: float(usual[column]) for column in large}


def _are_pixels(tally: Tally) -> bool:
    if not (tally.lowest >= 0 and _PIXELS[0] <= tally.highest <= _PIXELS[1]):
        return False
    elements = tally.elements[tally.elements.isfinite()]
    is_picture = tally.shape is None or len(tally.shape) >= 2
    return is_picture and bool((elements == elements.round()).all())


def unvarying(inspection: Inspection, tally: Tally) -> Iterator[Judgement]:
    """Columns or channels that are the same in all rows, or rows that are all the same."""
    role = inspection.roles[tally.path]
    if role not in (Role.INPUT, Role.TARGET) or tally.is_sparse or tally.rows < FEWEST_ROWS:
        return
    elements = tally.elements
    if elements.isfinite().any() and _all_alike(elements):
        yield _same_rows(tally, _is_only_input(inspection, tally))
    elif columns := _constant_columns(tally, elements):
        yield _constant(columns, tally)


def _all_alike(elements: Tensor) -> bool:
    return bool(((elements == elements[0]) | elements.isnan()).all())


def _is_only_input(inspection: Inspection, tally: Tally) -> bool:
    inputs = [path for path, role in inspection.roles.items() if role is Role.INPUT]
    return inputs == [tally.path]


def _same_rows(tally: Tally, is_only_input: bool) -> Judgement:
    level: Level = "high" if is_only_input else "low"
    said = Said(
        level=level,
        what=f"All {len(tally.elements):,} rows that were compared are the same.",
        fix="If that is not meant, look at how the dataset uses its index; where it is "
        "standardised, divide by `std.clamp_min(1e-6)`.",
        cause="bad_input_data",
    )
    return Judgement(kind="same_rows", path=tally.path, said=said)


def _constant_columns(tally: Tally, elements: Tensor) -> dict[int, float]:
    ranges = tally.channels
    if ranges is None:
        return {}
    is_constant = ranges.low == ranges.high
    if tally.columns is not None:
        is_constant |= tally.moments.std <= _HARDLY * tally.moments.mean.abs()
        is_constant &= tally.moments.count > 0
    if (elements == 0).sum() > elements.numel() / 2:
        # One-hot, padded or sparse: what was never set is no surprise.
        is_constant &= ranges.low != 0
    return {n: float(ranges.low[n]) for n in is_constant.nonzero().flatten().tolist()}


def _constant(columns: dict[int, float], tally: Tally) -> Judgement:
    numbers = list(columns)
    name = "column" if tally.shape is not None and len(tally.shape) == 1 else "channel"
    value = f"{columns[numbers[0]]:.4g}" if len(set(columns.values())) == 1 else "constant"
    verb = "is" if len(numbers) == 1 else "are"
    said = Said(
        level="low",
        what=f"{named_columns(numbers, name).capitalize()} {verb} {value} in all "
        f"{tally.rows:,} rows.",
        fix="Leave out what does not vary; where it is standardised, divide by "
        "`std.clamp_min(1e-6)`, since its std is 0.",
        cause="division_by_zero",
        evidence={"columns": len(numbers), "first": numbers[0]},
    )
    return Judgement(kind="constant", path=tally.path, said=said)


_WILD = 1000.0


@dataclass(frozen=True, eq=False)
class Fence:
    """What lies outside is an outlier: by the columns of a table, or by the ends of each row."""

    limits: Limits
    has_columns: bool

    def rows_outside(self, leaf: Leaf, ends: Ends) -> Tensor:
        """For each row of the leaf whether it reaches outside."""
        block = torch.stack([ends.low, ends.high], dim=1)
        if self.has_columns:
            block = flat(leaf.values).double()
            block = torch.where(block.isfinite(), block, torch.nan)
        if block.shape[1] != len(self.limits.center):
            return torch.zeros(len(block), dtype=torch.bool)
        return self.limits.beyond(block).any(1)


def fences(inspection: Inspection) -> dict[str, Fence]:
    """For each tensor that has outliers what they are outside of."""
    made = {path: fence_for(inspection, tally) for path, tally in inspection.tallies.items()}
    return {
        path: fence
        for path, fence in made.items()
        if fence and fence.limits.beyond(inspection.tallies[path].table.extremes).any()
    }


def fence_for(inspection: Inspection, tally: Tally) -> Fence | None:
    """None where nothing can be said: for other than floating inputs and targets, or few rows."""
    is_judged = inspection.roles[tally.path] in (Role.INPUT, Role.TARGET)
    if not is_judged or not tally.dtype.startswith("float"):
        return None
    has_columns, rows = tally.columns is not None, tally.sample.rows
    rows = rows[:, 2:] if has_columns else rows[:, :2]
    limits = limits_of(rows, tally.table.extremes, usual_size(tally.elements) or 1.0)
    return None if limits is None else Fence(limits, has_columns)


def outliers(inspection: Inspection, tally: Tally) -> Iterator[Judgement]:
    fence = fence_for(inspection, tally)
    if fence is not None:
        is_out = fence.limits.beyond(tally.table.extremes)
        if is_out.any():
            yield _judged(inspection, tally, fence.limits, is_out)


def _judged(inspection: Inspection, tally: Tally, limits: Limits, is_out: Tensor) -> Judgement:
    table = tally.table
    places = table.places[is_out].unique().tolist()
    is_more = bool(is_out.reshape(2, -1, is_out.shape[1]).all(1).any())
    if tally.path in inspection.outliers:  # of a second pass, which saw all of them
        places, is_more = inspection.outliers[tally.path], False
    values, columns = table.extremes[is_out], is_out.nonzero()[:, 1]
    times = limits.times(values, columns)
    worst = int(times.argmax())
    value, column = float(values[worst]), columns[worst]
    rows = f"{'At least ' if is_more else ''}{len(places):,} row{'s' * (len(places) != 1)}"
    usual = f"{limits.center[column]:.3g} ± {limits.usual[column]:.3g}"
    said = Said(
        level="high" if min(float(times[worst]), abs(value)) >= _WILD else "medium",
        what=f"{rows} out of scale{_where(tally, columns)}: up to {value:.4g}, "
        f"where {usual} is usual.",
        fix="Look at these rows. A mark for what is missing, such as -9999, has to go; a long tail "
        "can be bounded, `x.clamp(low, high)`, or shortened, `torch.log1p(x)`.",
        cause="unnormalized_input",
        evidence={"worst": value, "times": float(times[worst]), "rows": len(places)},
    )
    return Judgement(kind="outlier", path=tally.path, said=said, places=places)


def _where(tally: Tally, columns: Tensor) -> str:
    if tally.columns is None or tally.columns.width == 1:
        return ""
    return f" in {named_columns(columns.unique().tolist())}"


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


Evidence = dict[str, float | int | str]


@dataclass(frozen=True, kw_only=True)
class Said:
    """How bad it is, what was seen, what to do, and which cause it would be."""

    level: Level
    what: str
    fix: str
    cause: str
    evidence: Evidence = field(default_factory=dict)


def of(number: int, total: int, one: str, many: str) -> str:
    return f"{number:,} of {total:,} {many if total != 1 else one}"


def _rows(case: Case, inspection: Inspection) -> str:
    return of(case.counts["rows"], inspection.samples, "row", "rows")


def non_finite(inspection: Inspection, path: str, case: Case) -> Said:
    nans, infs = case.counts["nan"], case.counts["inf"]
    kinds = [f"{count:,} {name}" for count, name in ((nans, "NaN"), (infs, "Inf")) if count]
    total = inspection.tallies[path].values
    what = f"{' and '.join(kinds)} of {total:,} values, in {_rows(case, inspection)}."
    evidence: Evidence = {"nan": nans, "inf": infs, "rows": case.counts["rows"]}
    if inspection.roles[path] in (Role.TARGET, Role.LABEL):
        return Said(
            level="medium",
            what=f"{what} One of them makes the loss of its whole batch NaN.",
            fix="If they mark what was not measured, leave them out of the loss: "
            "`keep = ~y.isnan()`, `loss(p[keep], y[keep]).sum() / keep.sum().clamp_min(1)`. "
            "Otherwise repair or drop these rows.",
            cause="bad_label",
            evidence=evidence,
        )
    return Said(
        level="high",
        what=f"{what} Every layer turns them into NaN.",
        fix="Repair or drop these rows where they are read; for values that are missing, "
        "`torch.nan_to_num(x, nan=0.0)` and a column that says so.",
        cause="bad_input_data",
        evidence=evidence,
    )


def label_range(inspection: Inspection, path: str, case: Case) -> Said:
    low, high = case.span or (0, 0)
    classes, labels = inspection.classes or 0, case.counts["labels"]
    values = f"{low}" if low == high else f"between {low} and {high}"
    return Said(
        level="high",
        what=f"{labels:,} labels, in {_rows(case, inspection)}, are {values}; "
        f"{classes} classes have labels 0 to {classes - 1}.",
        fix="Correct them, or have the loss leave them out with `ignore_index`, which is "
        f"{inspection.ignore_index} here.",
        cause="bad_label",
        evidence={"labels": labels, "lowest": low, "highest": high, "classes": classes},
    )


def negative_label(inspection: Inspection, path: str, case: Case) -> Said:
    low, high = case.span or (0, 0)
    values = f"{low}" if low == high else f"between {low} and {high}"
    labels = case.counts["labels"]
    is_one_mark = low == high
    return Said(
        level="medium" if is_one_mark else "low",
        what=f"{labels:,} labels, in {_rows(case, inspection)}, are {values}, which is no class.",
        fix=f"If they mean no label, give the loss `ignore_index={high}`; it is "
        f"{inspection.ignore_index} here. If these are not labels, name them with `targets=`.",
        cause="bad_label",
        evidence={"labels": labels, "lowest": low, "highest": high},
    )


def all_ignored(inspection: Inspection, path: str, case: Case) -> Said:
    batches = case.counts["batches"]
    return Said(
        level="high",
        what=f"In {of(batches, inspection.batches, 'batch', 'batches')} every label is "
        f"{inspection.ignore_index}, which the loss leaves out: its mean is 0 / 0.",
        fix="Divide by a count that is at least 1: `F.cross_entropy(x, y, reduction='sum') / "
        f"(y != {inspection.ignore_index}).sum().clamp_min(1)`, or drop rows without labels.",
        cause="bad_label",
        evidence={"batches": batches},
    )


def ignored_row(inspection: Inspection, path: str, case: Case) -> Said:
    """Of concern when rows like these are likely to meet in one batch."""
    rows, total = case.counts["rows"], max(inspection.samples, 1)
    size = max(inspection.sizes, default=1)
    expected = (rows / total) ** size * inspection.batches
    return Said(
        level="medium" if expected > 0.01 else "low",
        what=f"{_rows(case, inspection)} have only labels of {inspection.ignore_index}, which the "
        f"loss leaves out; {expected:.2g} batches of {size} in each epoch would have no others.",
        fix="Drop these rows, or divide the loss by a count of labels that is at least 1.",
        cause="bad_label",
        evidence={"rows": rows, "expected_batches": expected},
    )


def empty(inspection: Inspection, path: str, case: Case) -> Said:
    return Said(
        level="high",
        what=f"{_rows(case, inspection)} are empty sequences: their mean is 0 / 0, and attention "
        "has nothing to look at.",
        fix="Drop them where they are read, or give each one a token.",
        cause="empty_reduction",
        evidence={"rows": case.counts["rows"]},
    )


def masked(inspection: Inspection, path: str, case: Case) -> Said:
    name = path.rpartition(".")[2].lower()
    is_sure = "att" in name or "pad" in name
    return Said(
        level="high" if is_sure else "medium",
        what=f"The mask hides everything in {_rows(case, inspection)}: softmax over nothing but "
        "-Inf is NaN.",
        fix="Drop these rows, leave one position open, or use stayfinite.masked_softmax.",
        cause="softmax_all_masked",
        evidence={"rows": case.counts["rows"]},
    )


def masked_query(inspection: Inspection, path: str, case: Case) -> Said:
    return Said(
        level="medium",
        what=f"In {_rows(case, inspection)} the mask hides every key from some query: softmax "
        "over nothing but -Inf is NaN.",
        fix="Leave one key open for each query, or use stayfinite.masked_softmax.",
        cause="softmax_all_masked",
        evidence={"rows": case.counts["rows"]},
    )


def blank(inspection: Inspection, path: str, case: Case) -> Said:
    """A sequence of token ids that is only padding is empty; other blanks are worth knowing."""
    tally = inspection.tallies[path]
    is_text = tally.dtype.startswith("int") and len(tally.shape or (0,)) == 1 and tally.highest > 1
    return Said(
        level="medium" if is_text else "low",
        what=f"{_rows(case, inspection)} have the same value everywhere"
        + (": nothing but padding." if is_text else "."),
        fix="Drop them if they are empty."
        if is_text
        else "If rows are standardised one by one, divide by `std.clamp_min(1e-6)`.",
        cause="empty_reduction" if is_text else "division_by_zero",
        evidence={"rows": case.counts["rows"]},
    )


WORDS: dict[Kind, Callable[[Inspection, str, Case], Said]] = {
    "non_finite": non_finite,
    "label_range": label_range,
    "negative_label": negative_label,
    "all_ignored": all_ignored,
    "ignored_row": ignored_row,
    "empty": empty,
    "masked": masked,
    "masked_query": masked_query,
    "blank": blank,
}
