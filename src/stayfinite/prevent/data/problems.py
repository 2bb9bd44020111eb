"""What check_data found, as records, text and JSON; and how what was seen is judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from stayfinite.prevent.data.batch import ROOT, Role
from stayfinite.prevent.data.inspection import Inspection, Kind, Occurrences, split_place
from stayfinite.prevent.data.statistics import FEWEST_ROWS, OutlierLimits, TensorStatistics
from stayfinite.prevent.risks import LEVELS, Evidence, Level, Risk
from stayfinite.records import to_json

_MOST_PLACES = 100
_SHOWN = 8

# Sizes at which a first layer of torch's default weights and an ordinary rate no longer get along.
_LARGE_COLUMN = 300.0
_LARGE = 100.0
_LARGE_TARGET = 1e4
_HUGE = 1e5
_TINY = 1e-6
# White is 255, but not every picture has a white spot.
_PIXELS = (100.0, 255.0)
_HARDLY = 1e-6
_WILD = 1000.0


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
        whose = ""
        if self.kind == "all_ignored":
            batches = list(dict.fromkeys(batch for batch, _ in self.places))
            whose = f" It is {_list_of('batch', 'batches', batches)}."
        elif self.indices:
            whose = f" Dataset {_list_of('index', 'indices', self.indices)}."
        elif self.places:
            rows = [f"{row} of batch {batch}" for batch, row in self.places]
            whose = f" It is {_list_of('row', 'rows', rows)}."
        return f"{self.level}: {self.where}: {self.what}{whose}\n    {self.fix}"


def _list_of(one: str, many: str, items: Sequence[Any]) -> str:
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
        seen = f"{self.rows:,} rows in {amount(self.batches, 'batch', 'batches')}"
        if not self.findings:
            return f"{seen}: nothing found."
        head = f"{seen}: {amount(len(self.findings), 'finding', 'findings')}"
        bad = f", {len(self.bad_indices):,} bad samples" if self.bad_indices else ""
        return "\n".join([f"{head}{bad}", *map(str, self.findings)])


def amount(number: int, one: str, many: str) -> str:
    """Such as "1 row" or "2,000 rows"."""
    return f"{number:,} {one if number == 1 else many}"


def _columns(numbers: Sequence[int], name: str = "column") -> str:
    """Such as "columns 3, 5 and 7 more", and no more than a reader wants."""
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN:,} more" if len(numbers) > _SHOWN else ""
    return f"{name if len(numbers) == 1 else f'{name}s'} {shown}{more}"


def in_order(items: Iterable[Any]) -> tuple[Any, ...]:
    """Each once, sorted if they can be."""
    found = dict.fromkeys(items)
    try:
        return tuple(sorted(found))
    except TypeError:  # keys of several types
        return tuple(found)


def findings(inspection: Inspection) -> list[DataFinding]:
    """Everything there is to say, without indices, the worst first.

    Afterwards `inspection.seen` has the places of all samples that a finding is about.
    """
    inspection.settle()
    for path, padding in inspection.padding.items():  # masks about which only all batches tell
        if padding.hidden:
            inspection.seen.setdefault(("masked", path), Occurrences()).add(padding.hidden)
    found = [_about_rows(inspection, *key) for key in inspection.seen if key[0] != "outlier"]
    limits = inspection.outlier_limits()
    for path, tensor in inspection.tensors.items():
        if path in limits:
            found.append(_outliers(inspection, tensor, limits[path]))
        role, is_real = inspection.roles[path], tensor.dtype.startswith("float")
        if is_real and role in (Role.INPUT, Role.TARGET):
            found += _scale(tensor, role)
            found += _same(inspection, tensor)
    if ones := inspection.sizes[1]:
        what = (
            f"{ones:,} of {amount(inspection.batches, 'batch', 'batches')} "
            f"{'has' if ones == 1 else 'have'} one sample: BatchNorm has no variance to divide by."
        )
        fix = "`DataLoader(..., drop_last=True)`, or GroupNorm or LayerNorm."
        evidence: Evidence = {"batches": ones}
        found.append(finding_of("single", ROOT, "low", "batchnorm_degenerate", what, fix, evidence))
    return sorted(found, key=lambda finding: (LEVELS.index(finding.level), -finding.rows))


def finding_of(
    kind: Kind,
    where: str,
    level: Level,
    cause: str,
    what: str,
    fix: str,
    evidence: Evidence | None = None,
    *,
    places: Sequence[int] = (),
    indices: tuple[Any, ...] = (),
) -> DataFinding:
    rows = len(indices) or len(places)
    return DataFinding(
        kind=kind,
        level=level,
        what=what,
        where=where,
        fix=fix,
        cause=cause,
        evidence=evidence or {},
        score=float(rows),
        rows=rows,
        indices=indices,
        places=tuple(map(split_place, places[:_MOST_PLACES])),
    )


def _about_rows(inspection: Inspection, kind: Kind, path: str) -> DataFinding:
    """What was seen in single rows, in words."""
    seen, index, classes = inspection.seen[kind, path], inspection.ignore_index, inspection.classes
    counts = seen.counts
    rows = f"{counts['rows']:,} of {amount(inspection.samples, 'row', 'rows')}"
    evidence: Evidence = {"rows": counts["rows"]}
    level: Level = "medium"
    match kind:
        case "non_finite":
            pairs = ((counts["nan"], "NaN"), (counts["inf"], "Inf"))
            bad = " and ".join(f"{count:,} {name}" for count, name in pairs if count)
            what = f"{bad} of {inspection.tensors[path].values:,} values, in {rows}."
            evidence = {"nan": counts["nan"], "inf": counts["inf"], **evidence}
            if inspection.roles[path] in (Role.TARGET, Role.LABEL):
                cause = "bad_label"
                what += " One of them makes the loss of its whole batch NaN."
                fix = (
                    "If they mark what was not measured, exclude them from the loss: `keep = "
                    "~y.isnan()`, `loss(p[keep], y[keep]).sum() / keep.sum().clamp_min(1)`. "
                    "Otherwise repair or drop these rows."
                )
            else:
                level, cause = "high", "bad_input_data"
                what += " Every layer turns them into NaN."
                fix = (
                    "Repair or drop these rows where they are read; for values that are missing, "
                    "`torch.nan_to_num(x, nan=0.0)` and a column that says so."
                )
        case "label_range" | "negative_label":
            evidence = {name: counts[name] for name in ("labels", "lowest", "highest")}
            low, high, cause = counts["lowest"], counts["highest"], "bad_label"
            values = f"{low}" if low == high else f"between {low} and {high}"
            what = f"{counts['labels']:,} labels, in {rows}, are {values}"
            if classes is None:
                level = "medium" if low == high else "low"
                what += ", which is not a class."
                fix = (
                    f"If they mean no label, give the loss `ignore_index={high}`; it is {index} "
                    "here. If these are not labels, name them with `targets=`."
                )
            else:
                level, evidence["classes"] = "high", classes
                what += f"; {classes} classes have labels 0 to {classes - 1}."
                fix = (
                    "Correct them, or let the loss ignore them with `ignore_index`, which is "
                    f"{index} here."
                )
        case "all_ignored":
            level, cause, evidence = "high", "bad_label", {"batches": counts["batches"]}
            batches = f"{counts['batches']:,} of {amount(inspection.batches, 'batch', 'batches')}"
            what = (
                f"In {batches} every label is {index}, which the loss ignores: its mean is 0 / 0."
            )
            fix = (
                "Divide by a count that is at least 1: `F.cross_entropy(x, y, reduction='sum') / "
                f"(y != {index}).sum().clamp_min(1)`, or drop rows without labels."
            )
        case "ignored_row":  # of concern when rows like these are likely to meet in one batch
            size, share = max(inspection.sizes), counts["rows"] / max(inspection.samples, 1)
            expected = evidence["expected_batches"] = share**size * inspection.batches
            level, cause = "medium" if expected > 0.01 else "low", "bad_label"
            what = (
                f"{rows} have only labels of {index}, which the loss ignores; {expected:.2g} "
                f"batches of {size} in each epoch would have no others."
            )
            fix = "Drop these rows, or divide the loss by a count of labels that is at least 1."
        case "empty":
            level, cause = "high", "empty_reduction"
            what = (
                f"{rows} are empty sequences: their mean is 0 / 0, and attention has nothing to "
                "look at."
            )
            fix = "Drop them where they are read, or give each one a token."
        case "masked":
            name, cause = path.rpartition(".")[2].lower(), "softmax_all_masked"
            level = "high" if "att" in name or "pad" in name else "medium"
            what = f"The mask hides everything in {rows}: softmax over nothing but -Inf is NaN."
            fix = "Drop these rows, leave one position open, or use stayfinite.masked_softmax."
        case "masked_query":
            cause = "softmax_all_masked"
            what = (
                f"In {rows} the mask hides every key from some query: softmax over nothing but "
                "-Inf is NaN."
            )
            fix = "Leave one key open for each query, or use stayfinite.masked_softmax."
        case _:  # blank: token ids that are only padding are empty; others are worth knowing
            tensor, what = inspection.tensors[path], f"{rows} have the same value everywhere"
            is_text = tensor.dtype.startswith("int") and len(tensor.shape or (0,)) == 1
            if is_text and tensor.highest > 1:
                what, cause = f"{what}: nothing but padding.", "empty_reduction"
                fix = "Drop them if they are empty."
            else:
                level, what, cause = "low", f"{what}.", "division_by_zero"
                fix = "If rows are standardised one by one, divide by `std.clamp_min(1e-6)`."
    return finding_of(kind, path, level, cause, what, fix, evidence, places=seen.places)


def _outliers(
    inspection: Inspection, tensor: TensorStatistics, limits: OutlierLimits
) -> DataFinding:
    table = tensor.table
    is_out = limits.beyond(table.values)
    seen, is_more = inspection.seen.get(("outlier", tensor.path)), False
    if seen is None:  # else a second pass saw all of them
        seen = inspection.seen["outlier", tensor.path] = Occurrences()
        seen.add(table.places[is_out].unique().tolist())
        is_more = bool(is_out.reshape(2, -1, is_out.shape[1]).all(1).any())
    places = seen.places
    values, columns = table.values[is_out], is_out.nonzero()[:, 1]
    times = limits.times(values, columns)
    worst = int(times.argmax())
    value, factor, column = float(values[worst]), float(times[worst]), columns[worst]
    rows = f"{'At least ' if is_more else ''}{amount(len(places), 'row', 'rows')}"
    has_columns = tensor.columns is not None and tensor.columns.width > 1
    where = f" in {_columns(columns.unique().tolist())}" if has_columns else ""
    what = (
        f"{rows} out of scale{where}: up to {value:.4g}, where "
        f"{limits.center[column]:.3g} ± {limits.usual[column]:.3g} is usual."
    )
    fix = (
        "Look at these rows. A mark for what is missing, such as -9999, has to go; a long tail "
        "can be bounded, `x.clamp(low, high)`, or shortened, `torch.log1p(x)`."
    )
    level: Level = "high" if min(factor, abs(value)) >= _WILD else "medium"
    evidence: Evidence = {"worst": value, "times": factor, "rows": len(places)}
    cause = "unnormalized_input"
    return finding_of("outlier", tensor.path, level, cause, what, fix, evidence, places=places)


def _scale(tensor: TensorStatistics, role: Role) -> Iterator[DataFinding]:
    """Values that are large or tiny throughout."""
    if tensor.elements.numel() < FEWEST_ROWS:
        return
    usual, what, cause = tensor.usual, "", "unnormalized_input"
    if role is Role.TARGET:
        if usual >= _LARGE_TARGET:
            what = f"The targets are about {usual:.3g} in size, a squared error {usual**2:.1g}."
            fix = "Predict `(y - mean) / std`, or `torch.log1p(y)` of amounts."
            yield finding_of("scale", tensor.path, "medium", cause, what, fix, {"usual": usual})
        return
    if tensor.columns is not None:
        sizes = tensor.elements.abs()
        medians = torch.where(sizes > 0, sizes, torch.nan).nanmedian(0).values
        large = (medians >= _LARGE_COLUMN).nonzero().flatten()
        if len(large):
            usual = float(medians[large].max())
            what = f"About {usual:.3g} is usual in {_columns(large.tolist())}."
    elif _are_pixels(tensor):
        what = f"These look like pixels from 0 to {tensor.highest:.0f}."
    elif usual >= _LARGE:
        what = f"The values are about {usual:.3g} in size."
    level: Level = "high" if usual >= _HUGE else "medium"
    if what:
        what += " Activations and gradients grow by that factor."
        fix = (
            "Standardise with the statistics of the training set, "
            "`(x - mean) / std.clamp_min(1e-6)`; pixels, `x / 255`."
        )
    elif 0 < usual < _TINY:
        what = f"The values are about {usual:.3g} in size, less than the eps of a normalisation."
        level, cause = "low", "low_precision_underflow"
        fix = "Standardise them: `(x - mean) / std`."
    else:
        return
    yield finding_of("scale", tensor.path, level, cause, what, fix, {"usual": usual})


def _are_pixels(tensor: TensorStatistics) -> bool:
    if not (tensor.lowest >= 0 and _PIXELS[0] <= tensor.highest <= _PIXELS[1]):
        return False
    elements = tensor.elements[tensor.elements.isfinite()]
    is_picture = tensor.shape is None or len(tensor.shape) >= 2
    return is_picture and bool((elements == elements.round()).all())


def _same(inspection: Inspection, tensor: TensorStatistics) -> Iterator[DataFinding]:
    """Columns or channels that are the same in all rows, or rows that are all the same."""
    if tensor.is_sparse or tensor.rows < FEWEST_ROWS:
        return
    elements = tensor.elements
    if elements.isfinite().any() and bool(((elements == elements[0]) | elements.isnan()).all()):
        inputs = [path for path, role in inspection.roles.items() if role is Role.INPUT]
        level: Level = "high" if inputs == [tensor.path] else "low"
        what = f"All {len(elements):,} rows that were compared are the same."
        fix = (
            "If that is not meant, look at how the dataset uses its index; where it is "
            "standardised, divide by `std.clamp_min(1e-6)`."
        )
        yield finding_of("same_rows", tensor.path, level, "bad_input_data", what, fix)
    elif columns := _constant_columns(tensor):
        numbers = list(columns)
        name = "column" if tensor.shape is not None and len(tensor.shape) == 1 else "channel"
        value = f"{columns[numbers[0]]:.4g}" if len(set(columns.values())) == 1 else "constant"
        verb = "is" if len(numbers) == 1 else "are"
        named = _columns(numbers, name).capitalize()
        what = f"{named} {verb} {value} in all {tensor.rows:,} rows."
        fix = (
            "Remove what does not vary; where it is standardised, divide by "
            "`std.clamp_min(1e-6)`, since its std is 0."
        )
        evidence: Evidence = {"columns": len(numbers), "first": numbers[0]}
        cause = "division_by_zero"
        yield finding_of("constant", tensor.path, "low", cause, what, fix, evidence)


def _constant_columns(tensor: TensorStatistics) -> dict[int, float]:
    elements = tensor.elements
    if tensor.channels is None:
        return {}
    low, high = tensor.channels
    is_constant = low == high
    if tensor.columns is not None:
        is_constant |= tensor.moments.std <= _HARDLY * tensor.moments.mean.abs()
        is_constant &= tensor.moments.count > 0
    if (elements == 0).sum() > elements.numel() / 2:
        # One-hot, padded or sparse: what was never set is no surprise.
        is_constant &= low != 0
    return {n: float(low[n]) for n in is_constant.nonzero().flatten().tolist()}


def profile_of(tensor: TensorStatistics, role: Role) -> TensorProfile:
    moments = tensor.moments.pooled()
    has_moments, has_range = bool(moments.count > 0), tensor.lowest <= tensor.highest
    return TensorProfile(
        path=tensor.path,
        role=role.value,
        dtype=tensor.dtype,
        shape=tensor.shape,
        rows=tensor.rows,
        min=tensor.lowest if has_range else None,
        max=tensor.highest if has_range else None,
        mean=float(moments.mean) if has_moments else None,
        std=float(moments.std) if has_moments else None,
        usual=tensor.usual,
    )
