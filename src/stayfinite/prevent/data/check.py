"""check_data: is the data fit to train on? Every batch is looked at once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from stayfinite.detect.memory import undisturbed
from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.data.batch import Paths, leaves
from stayfinite.prevent.data.inspection import SAMPLE_BITS, Inspection, Key, Kind, split_place
from stayfinite.prevent.data.loader import (
    BatchRead,
    Reader,
    as_before,
    error_line,
    is_death_of_worker,
)
from stayfinite.prevent.data.problems import (
    DataFinding,
    DataReport,
    amount,
    finding_of,
    findings,
    in_order,
    profile_of,
)
from stayfinite.prevent.risks import LEVELS, Risk


def check_data(
    loader: Iterable[Any],
    *,
    classes: int | None = None,
    ignore_index: int = -100,
    inputs: Paths | None = None,
    targets: Paths | None = None,
    max_batches: int | None = None,
    passes: Literal[1, 2] = 1,
    progress: bool | None = None,
) -> DataReport:
    """Everything that is wrong with the batches of a loader, each looked at once.

    Found are values that are not finite, labels out of range (give `classes`) or all ignored,
    empty sequences, masks that hide whole rows, inputs out of scale, outliers, columns that do not
    vary, and samples that cannot be read; each with the dataset indices of the samples. `inputs`
    and `targets` are paths in a batch, such as "labels" or 1, where the usual guess is wrong.
    `progress` shows a bar; by default if stderr is a terminal.

    The loader is as if it had not been read: training gets the same batches in the same order. One
    pass finds the 32 largest and 32 smallest outliers of each column, a second one all of them.

    >>> import torch
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> x = torch.arange(600.0).reshape(100, 6).sin()
    >>> x[42, 3] = float("nan")
    >>> loader = DataLoader(TensorDataset(x, torch.arange(100) % 5), batch_size=8, shuffle=True)
    >>> report = check_data(loader, classes=5)
    >>> report.bad_indices
    (42,)
    >>> print(report[0].what)
    1 NaN of 600 values, in 1 of 100 rows. Every layer turns them into NaN.
    """
    _refuse_nonsense(loader, classes, max_batches, passes)
    inspection = Inspection(
        classes=classes, ignore_index=ignore_index, inputs=inputs, targets=targets
    )
    failures = Failures()
    with as_before(loader):
        reader = Reader(loader, max_batches)
        try:
            for read in _with_bar(reader, "checking the data", progress):
                if read.error is None:
                    inspection.look(read.batch, number=read.number, indices=read.indices)
                else:
                    failures.batches.append(read)
        except RuntimeError as error:
            if not is_death_of_worker(error):
                raise
            reader.was_stopped = error_line(error)
    if passes == 2:
        _find_all_outliers(inspection, loader, max_batches, progress)
    with as_before(loader):
        failures.look_again(reader, inspection)
        found = findings(inspection)
        indices: dict[Key, tuple[Any, ...]] = {}
        places = {key: seen.places for key, seen in inspection.seen.items()}
        if reader.has_indices and reader.is_row_known:
            indices = {key: in_order(inspection.indices_at(places[key])) for key in places}
        elif reader.has_indices:
            indices = Confirmation(reader, inspection).indices_of(places)
    said = failures.findings(reader.was_stopped, inspection.batches)
    for each in found:
        own = indices.get((each.kind, each.where), ())
        said.append(dataclasses.replace(each, indices=own))
    return DataReport(
        findings=tuple(sorted(said, key=lambda finding: LEVELS.index(finding.level))),
        batches=inspection.batches,
        rows=inspection.samples,
        tensors=tuple(
            profile_of(tensor, inspection.roles[path])
            for path, tensor in inspection.tensors.items()
        ),
        has_indices=reader.has_indices,
    )


def _refuse_nonsense(
    loader: Any, classes: int | None, max_batches: int | None, passes: int
) -> None:
    if not isinstance(loader, Iterable):
        raise InputError(
            f"loader is a {type(loader).__name__}; it must be a DataLoader or give batches."
        )
    if passes not in (1, 2):
        raise ConfigError(f"passes is {passes}; it must be 1 or 2.")
    if passes == 2 and isinstance(loader, Iterator):
        raise InputError("loader can be read only once; passes=2 needs one that gives iterators.")
    for name, value in (("classes", classes), ("max_batches", max_batches)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")


def _find_all_outliers(
    inspection: Inspection, loader: Any, max_batches: int | None, progress: bool | None
) -> None:
    inspection.settle()
    limits = inspection.outlier_limits()
    if not limits:
        return
    with as_before(loader):
        for read in _with_bar(Reader(loader, max_batches), "listing the outliers", progress):
            if read.error is None:
                number, indices = read.number, read.indices
                inspection.look_for_outliers(limits, read.batch, number=number, indices=indices)


def _with_bar(reader: Reader, what: str, progress: bool | None) -> Iterator[BatchRead]:
    """The batches, with a bar on stderr."""
    console = Console(stderr=True, force_terminal=True if progress else None)
    is_shown = console.is_terminal if progress is None else progress
    length, reads = reader.length, iter(reader)
    # The workers are started before the bar, which has a thread: forking with threads is unsafe.
    first = next(reads, None)
    if first is None:
        return
    with Progress(console=console, transient=True, disable=not is_shown) as bar:
        task = bar.add_task(what, total=length)
        for read in chain([first], reads):
            yield read
            bar.advance(task)


def batch_risks(
    batch: Any,
    *,
    classes: int | None = None,
    ignore_index: int = -100,
    inputs: Paths | None = None,
    targets: Paths | None = None,
) -> list[Risk]:
    """Everything that is wrong with a batch, the worst first; see check_data for what is looked at.

    One batch says less than all of them: outliers and columns that do not vary need 32 rows. The
    batch is not changed.

    >>> import torch
    >>> images, labels = torch.rand(64, 3, 8, 8), torch.randint(10, (64,))
    >>> batch_risks([images, labels], classes=10)
    []
    >>> images[5, 0, 0, 0] = float("nan")
    >>> [(risk.level, risk.where, risk.cause) for risk in batch_risks([images, labels])]
    [('high', 'batch.0', 'bad_input_data')]
    """
    inspection = Inspection(
        classes=classes, ignore_index=ignore_index, inputs=inputs, targets=targets
    )
    inspection.look(batch)
    return list[Risk](findings(inspection))


class Failures:
    """Batches in whose place there was an error, and the samples that are to blame for it."""

    def __init__(self) -> None:
        self.batches: list[BatchRead] = []
        self._samples: dict[Any, str] = {}

    def look_again(self, reader: Reader, inspection: Inspection) -> None:
        """Reads the samples of these batches one by one, and looks at those that can be read."""
        batches = [(read, read.indices) for read in self.batches if read.indices]
        errors = iter(list(reader.errors_of([i for _, indices in batches for i in indices])))
        rest: dict[int, list[Any]] = {}
        for read, indices in batches:
            bad = {index: error for index in indices if (error := next(errors))}
            self._samples |= bad
            if bad:
                self.batches.remove(read)
                rest[read.number] = [index for index in indices if index not in bad]
        rest = {number: indices for number, indices in rest.items() if indices}
        reads = reader.read_each(list(rest.values()))
        for (number, indices), (batch, error) in zip(rest.items(), reads, strict=True):
            if error is None:
                inspection.look(batch, number=number, indices=indices)

    def findings(self, was_stopped: str | None, batches: int) -> list[DataFinding]:
        """One for each type of error, and what kept the loader from giving more than `batches`."""
        found: list[DataFinding] = []
        for errors in _by_type(self._samples.items()):
            is_end = errors[0][1].startswith("StopIteration")
            what = _error_words(errors, "sample", "samples")
            what += " It ends the epoch in silence." if is_end else ""
            indices = in_order(index for index, _ in errors)
            found.append(_reading_failure("error", "dataset", what, indices=indices))
        for errors in _by_type([(read, read.error or "") for read in self.batches]):
            is_alone = any(read.indices for read, _ in errors)
            what = _error_words(errors, "batch", "batches")
            what += (
                " Each sample alone can be read: it is the collate function." if is_alone else ""
            )
            places = [read.number << SAMPLE_BITS for read, _ in errors]
            found.append(_reading_failure("error", "loader", what, places=places))
        if was_stopped is not None:
            what = f"After {batches:,} batches it could not go on: {was_stopped.removesuffix('.')}."
            found.append(_reading_failure("stopped", "loader", what))
        elif not batches and not found:
            what = "It gives no batch: a mean over the epoch is 0 / 0."
            fix = (
                "Look at the length of the dataset; `drop_last=True` drops a batch that is not "
                "full."
            )
            found.append(finding_of("no_batches", "loader", "high", "empty_reduction", what, fix))
        return found


def _by_type(errors: Iterable[tuple[Any, str]]) -> Iterable[list[tuple[Any, str]]]:
    groups: dict[str, list[tuple[Any, str]]] = {}
    for item, error in errors:
        groups.setdefault(error.partition(":")[0], []).append((item, error))
    return groups.values()


def _error_words(errors: Sequence[tuple[Any, str]], one: str, many: str) -> str:
    return f"Reading {amount(len(errors), one, many)} raises {errors[0][1].removesuffix('.')}."


def _reading_failure(
    kind: Kind, where: str, what: str, places: Sequence[int] = (), indices: tuple[Any, ...] = ()
) -> DataFinding:
    fix = "Open such a sample yourself, `dataset[index]`, and repair it or remove it."
    found = finding_of(
        kind, where, "high", "bad_input_data", what, fix, places=places, indices=indices
    )
    return dataclasses.replace(found, evidence={"rows": found.rows})


class Confirmation:
    """Which samples are bad, when the rows of a batch need not be in the order of its indices.

    Each suspect is read alone, through the same collate function, and is guilty if the same is
    seen in the same tensor. First the sample at the place of the bad row, then, if that is not it,
    all others of its batch.
    """

    def __init__(self, reader: Reader, inspection: Inspection) -> None:
        self._reader, self._inspection = reader, inspection
        self._limits = inspection.outlier_limits()
        self._seen: dict[Any, set[Key]] = {}

    def indices_of(self, places: Mapping[Key, Sequence[int]]) -> dict[Key, tuple[Any, ...]]:
        """For what is wrong at these places the dataset indices that are certain."""
        all_indices = self._inspection.indices
        self._read(i for each in places.values() for i in self._inspection.indices_at(each))
        # Batches in which fewer samples are guilty so far than rows are bad.
        rows = {key: Counter(split_place(p)[0] for p in each) for key, each in places.items()}
        unexplained = [
            batch
            for key, counts in rows.items()
            for batch, count in counts.items()
            if len(self._guilty(key, batch)) < count
        ]
        self._read(index for batch in unexplained for index in all_indices.get(batch, ()))
        return {
            key: in_order(index for batch in counts for index in self._guilty(key, batch))
            for key, counts in rows.items()
        }

    def _guilty(self, key: Key, batch: int) -> list[Any]:
        indices = self._inspection.indices.get(batch, ())
        return [index for index in indices if key in self._seen.get(index, ())]

    def _read(self, indices: Iterable[Any]) -> None:
        new = [index for index in dict.fromkeys(indices) if index not in self._seen]
        singles = self._reader.read_each([[index] for index in new])
        for index, (batch, error) in zip(new, singles, strict=True):
            self._seen[index] = set() if error else self._look(batch)

    @undisturbed
    def _look(self, batch: Any) -> set[Key]:
        found: set[Key] = set()
        for leaf in leaves(batch, 1):
            found |= {(kind, leaf.path) for kind, _, _ in self._inspection.bad_samples(leaf)}
            limits, tensor = self._limits.get(leaf.path), self._inspection.tensors.get(leaf.path)
            if limits and tensor and tensor.rows_beyond(limits, leaf).any():
                found.add(("outlier", leaf.path))
        return found
