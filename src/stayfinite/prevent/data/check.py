"""check_data: is the data fit to train on? Every batch is looked at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.data.batch import Paths, Picked
from stayfinite.prevent.data.inspection import Inspection, Key, Kind
from stayfinite.prevent.data.loader import (
    Confirmation,
    Read,
    Reader,
    SecondPass,
    Twin,
    as_before,
    errors_of,
    is_death_of_worker,
    read_each,
    told,
)
from stayfinite.prevent.data.problems import (
    DataFinding,
    DataReport,
    Judgement,
    findings,
    in_order,
    judgements,
    profiles,
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

    The loader is as if nobody had read it: training gets the same batches in the same order. One
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
    picked = Picked.of(inputs, targets)
    inspection = Inspection(classes=classes, ignore_index=ignore_index, picked=picked)
    failures = Failures()
    with as_before(loader):
        reader = Reader(loader, max_batches)
        _look_at_all(reader, inspection, failures, progress)
    if passes == 2:
        _find_all_outliers(inspection, loader, max_batches, progress)
    with as_before(loader):
        if reader.twin is not None:
            failures.look_again(reader.twin, inspection)
        said = judgements(inspection)
        indices = _indices(reader.twin, inspection, said)
    found = [*_failed(reader, failures, inspection), *findings(said, indices)]
    return DataReport(
        findings=tuple(sorted(found, key=lambda finding: LEVELS.index(finding.level))),
        batches=inspection.batches,
        rows=inspection.samples,
        tensors=profiles(inspection),
        has_indices=reader.twin is not None and reader.twin.has_indices,
    )


def _look_at_all(
    reader: Reader, inspection: Inspection, failures: Failures, progress: bool | None
) -> None:
    try:
        for read in _shown(reader, "checking the data", progress):
            if read.error is None:
                inspection.look(read.batch, number=read.number, indices=read.indices)
            else:
                failures.add(read)
    except RuntimeError as error:
        if not is_death_of_worker(error):
            raise
        reader.was_stopped = told(error)


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
    second = SecondPass(inspection)
    if not inspection.outliers:
        return
    with as_before(loader):
        for read in _shown(Reader(loader, max_batches), "listing the outliers", progress):
            if read.error is None:
                second.look(read.batch, number=read.number, indices=read.indices)


def _shown(reader: Reader, what: str, progress: bool | None) -> Iterator[Read]:
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


def _indices(
    twin: Twin | None, inspection: Inspection, said: list[Judgement]
) -> dict[Key, tuple[Any, ...]]:
    """The dataset indices of what each judgement is about, as far as they are certain."""
    cases = {(each.kind, each.path): each.places for each in said if each.places}
    if twin is None or not twin.has_indices:
        return {}
    if not twin.is_row_known:
        return Confirmation(twin, inspection).guilty(cases)
    return {key: in_order(inspection.indices_at(places)) for key, places in cases.items()}


def _failed(reader: Reader, failures: Failures, inspection: Inspection) -> Iterator[DataFinding]:
    yield from failures.findings()
    if reader.was_stopped is not None:
        yield stopped(reader.was_stopped, inspection.batches)
    elif not inspection.batches and not any(failures.findings()):
        yield no_batches()


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
        classes=classes, ignore_index=ignore_index, picked=Picked.of(inputs, targets)
    )
    inspection.look(batch)
    return list(findings(judgements(inspection), {}))


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
