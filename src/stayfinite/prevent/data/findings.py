"""What check_data found: records, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from stayfinite.prevent.data.sights import Kind
from stayfinite.prevent.risks import Risk
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
