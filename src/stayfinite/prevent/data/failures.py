"""What cannot be read: samples, batches, or the rest of the loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stayfinite.prevent.data.findings import DataFinding, in_order
from stayfinite.prevent.data.inspection import Inspection
from stayfinite.prevent.data.reading import Read
from stayfinite.prevent.data.second import errors_of, read_each
from stayfinite.prevent.data.sights import Kind
from stayfinite.prevent.data.twin import Twin

_MOST_PLACES = 100
_FIX = "Open such a sample yourself, `dataset[index]`, and repair it or leave it out."


class Failures:
    """Batches in whose place there was an error, and the samples that are to blame for it."""

    def __init__(self) -> None:
        self._batches: list[Read] = []
        self._samples: dict[Any, str] = {}

    def add(self, read: Read) -> None:
        self._batches.append(read)

    def look_again(self, twin: Twin, inspection: Inspection) -> None:
        """Reads the samples of these batches one by one, and looks at those that can be read."""
        batches = [read for read in self._batches if read.indices]
        errors = iter(errors_of(twin, [i for read in batches for i in read.indices or ()]))
        rest: list[tuple[int, list[Any]]] = []
        for read in batches:
            bad = {i: error for i in read.indices or () if (error := next(errors))}
            self._samples |= bad
            if bad:
                self._batches.remove(read)
                rest.append((read.number, [i for i in read.indices or () if i not in bad]))
        rest = [(number, indices) for number, indices in rest if indices]
        for (number, indices), (batch, error) in zip(
            rest, read_each(twin, [indices for _, indices in rest]), strict=True
        ):
            if error is None:
                inspection.look(batch, number=number, indices=indices)

    def findings(self) -> Iterator[DataFinding]:
        """One for each type of error."""
        for errors in _by_type(self._samples.items()):
            indices = in_order(index for index, _ in errors)
            yield _finding("error", "dataset", _of_samples(errors), indices=indices)
        for errors in _by_type([(read, read.error or "") for read in self._batches]):
            places = tuple((read.number, 0) for read, _ in errors)
            yield _finding("error", "loader", _of_batches(errors), places=places)


def _by_type(errors: Any) -> list[list[tuple[Any, str]]]:
    groups: dict[str, list[tuple[Any, str]]] = {}
    for item, error in errors:
        groups.setdefault(error.partition(":")[0], []).append((item, error))
    return list(groups.values())


def _of_samples(errors: list[tuple[Any, str]]) -> str:
    error = errors[0][1]
    count = "1 sample" if len(errors) == 1 else f"{len(errors):,} samples"
    end = " It ends the epoch in silence." if error.startswith("StopIteration") else ""
    return f"Reading {count} raises {error.removesuffix('.')}.{end}"


def _of_batches(errors: list[tuple[Any, str]]) -> str:
    error = errors[0][1]
    count = "1 batch" if len(errors) == 1 else f"{len(errors):,} batches"
    alone = any(read.indices for read, _ in errors)
    end = " Each sample alone can be read: it is the collate function." if alone else ""
    return f"Reading {count} raises {error.removesuffix('.')}.{end}"


def stopped(error: str, batches: int) -> DataFinding:
    """The loader broke down, and the rest could not be looked at."""
    what = f"After {batches:,} batches it could not go on: {error.removesuffix('.')}."
    return _finding("stopped", "loader", what)


def no_batches() -> DataFinding:
    return DataFinding(
        kind="no_batches",
        level="high",
        what="It gives no batch: a mean over the epoch is 0 / 0.",
        where="loader",
        fix="Look at the length of the dataset; `drop_last=True` drops a batch that is not full.",
        cause="empty_reduction",
    )


def _finding(
    kind: Kind,
    where: str,
    what: str,
    *,
    indices: tuple[Any, ...] = (),
    places: tuple[tuple[int, int], ...] = (),
) -> DataFinding:
    rows = len(indices) or len(places)
    return DataFinding(
        kind=kind,
        level="high",
        what=what,
        where=where,
        fix=_FIX,
        cause="bad_input_data",
        evidence={"rows": rows},
        score=float(rows),
        rows=rows,
        indices=indices,
        places=places[:_MOST_PLACES],
    )
