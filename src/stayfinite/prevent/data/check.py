"""check_data: is the data fit to train on?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.data.failures import Failures, no_batches, stopped
from stayfinite.prevent.data.findings import DataFinding, DataReport, in_order
from stayfinite.prevent.data.inspection import Inspection, Key
from stayfinite.prevent.data.judgement import Judgement
from stayfinite.prevent.data.judging import findings, judgements, profiles
from stayfinite.prevent.data.reading import Read, Reader, is_death_of_worker, told
from stayfinite.prevent.data.roles import Paths, Picked
from stayfinite.prevent.data.second import Confirmation, SecondPass
from stayfinite.prevent.data.twin import Twin
from stayfinite.prevent.data.untouched import as_before
from stayfinite.prevent.risks import LEVELS


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
