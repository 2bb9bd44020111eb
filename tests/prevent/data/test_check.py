"""Faults in loaders of every make: each is found, with the exact indices in the dataset."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from stayfinite.errors import ConfigError, InputError
from stayfinite.prevent.data import DataFinding, DataReport, check_data
from stayfinite.prevent.data.inspection import Inspection

NAN = float("nan")


def table(rows: int = 100, *, bad: tuple[int, ...] = ()) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=generator)
    x[list(bad), 2] = NAN
    return TensorDataset(x, torch.arange(rows) % 5)


def found(report: DataReport, kind: str) -> DataFinding:
    (finding,) = [finding for finding in report if finding.kind == kind]
    return finding


def kinds(report: DataReport) -> list[str]:
    return [finding.kind for finding in report]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_indices_of_bad_samples_are_exact(shuffle: bool, workers: int) -> None:
    torch.manual_seed(0)
    bad = (0, 17, 18, 63, 99)
    loader = DataLoader(table(bad=bad), batch_size=7, shuffle=shuffle, num_workers=workers)
    report = check_data(loader)
    assert report.bad_indices == bad
    assert found(report, "non_finite").rows == 5
    assert (report.rows, report.batches, report.has_indices) == (100, 15, True)


def test_every_row_fault_has_its_indices() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(200, 6), torch.randint(5, (200,))
    x[3, 1], x[150, 0] = NAN, float("inf")
    y[[20, 21]] = 9
    x[77, 4] = 1e6
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    report = check_data(loader, classes=5)
    assert {finding.kind: finding.indices for finding in report} == {
        "non_finite": (3, 150),
        "label_range": (20, 21),
        "outlier": (77,),
    }
    assert report.bad_indices == (3, 20, 21, 77, 150)


class Everywhere(Sampler[list[int]]):
    """Batches of many sizes, in an order of its own, some samples twice."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batches

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_of_any_make_tells_its_indices(workers: int) -> None:
    batches = [[9, 3], [50, 3, 7, 8], [1], [99]]
    sampler = Everywhere(batches)
    loader = DataLoader(table(bad=(3, 99)), batch_sampler=sampler, num_workers=workers)
    report = check_data(loader)
    assert report.bad_indices == (3, 99)
    assert found(report, "non_finite").places == ((0, 1), (1, 1), (3, 0))


def test_a_plain_list_can_be_a_sampler_and_its_items_numpy_numbers() -> None:
    order = list(np.random.default_rng(0).permutation(100))
    loader = DataLoader(table(bad=(42,)), batch_size=8, sampler=order)
    assert check_data(loader).bad_indices == (42,)


def test_keys_need_not_be_numbers() -> None:
    class Named(Dataset[Tensor]):
        def __getitem__(self, key: Any) -> Tensor:
            return torch.full((3,), NAN if key == "b7" else 1.0)

    names = [f"{letter}{n}" for letter in "ab" for n in range(10)]
    report = check_data(DataLoader(Named(), batch_size=4, sampler=names))
    assert report.bad_indices == ("b7",)


def test_indices_of_a_subset_are_those_of_the_subset() -> None:
    subset = Subset(table(bad=(40, 41)), range(30, 50))
    assert check_data(DataLoader(subset, batch_size=4)).bad_indices == (10, 11)


def test_without_automatic_batching_a_sample_is_found() -> None:
    report = check_data(DataLoader(table(bad=(5,)), batch_size=None))
    assert report.bad_indices == (5,)


def test_a_sampler_that_gives_whole_batches_of_indices_is_understood() -> None:
    sampler = BatchSampler(SequentialSampler(range(100)), 8, drop_last=False)
    loader = DataLoader(table(bad=(5, 66)), batch_size=None, sampler=sampler)
    assert check_data(loader).bad_indices == (5, 66)


def sorted_by_size(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    rows = sorted(rows, key=lambda row: float(row[0][0]))
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def only_even(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    kept = [row for row in rows if row[1] % 2 == 0]
    return torch.stack([x for x, _ in kept]), torch.stack([y for _, y in kept])


def end_to_end(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    parts = [x.repeat(2 + int(y), 1) for x, y in rows]
    owners = [torch.full((len(part),), n) for n, part in enumerate(parts)]
    return {"nodes": torch.cat(parts), "graph_index": torch.cat(owners)}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [sorted_by_size, only_even, end_to_end])
def test_a_collate_function_may_sort_drop_and_join(
    collate: Callable[[Any], Any], workers: int
) -> None:
    torch.manual_seed(0)
    bad = (12, 30, 72)  # their labels are even
    loader = DataLoader(
        table(bad=bad), batch_size=9, shuffle=True, collate_fn=collate, num_workers=workers
    )
    assert check_data(loader).bad_indices == bad


def test_outliers_are_confirmed_under_a_collate_function_too() -> None:
    torch.manual_seed(0)
    data = table()
    data.tensors[0][[8, 64], 3] = 1e5
    loader = DataLoader(data, batch_size=9, shuffle=True, collate_fn=sorted_by_size)
    assert check_data(loader).bad_indices == (8, 64)


def test_what_cannot_be_confirmed_is_told_by_batch_and_row() -> None:
    class Flaky(Dataset[Tensor]):
        """A sample that is bad the first time it is read."""

        reads = 0

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Tensor:
            Flaky.reads += index == 11
            return torch.full((3,), NAN if index == 11 and Flaky.reads == 1 else float(index))

    report = check_data(DataLoader(Flaky(), batch_size=4, collate_fn=torch.stack))
    finding = found(report, "non_finite")
    assert (finding.rows, finding.indices, finding.places) == (1, (), ((2, 3),))
    assert "row 3 of batch 2" in str(finding)


class Broken(Dataset[tuple[Tensor, int]]):
    def __init__(self, errors: dict[int, Exception]) -> None:
        self.errors = errors

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index in self.errors:
            raise self.errors[index]
        return torch.full((3,), NAN if index == 9 else math_of(index)), index % 3


def math_of(index: int) -> float:
    return float(index % 7) / 7


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_a_finding_and_the_others_are_read(workers: int) -> None:
    errors: dict[int, Exception] = {8: ValueError("no file 8"), 30: ValueError("no file 30")}
    loader = DataLoader(Broken(errors), batch_size=4, num_workers=workers)
    report = check_data(loader)
    error = found(report, "error")
    assert (error.level, error.where, error.indices) == ("high", "dataset", (8, 30))
    assert error.what == "Reading 2 samples raises ValueError: no file 8."
    assert report.bad_indices == (8, 9, 30)  # 9 was in a batch with 8
    assert report.rows == 38


@pytest.mark.parametrize("workers", [0, 2])
def test_each_type_of_error_is_a_finding(workers: int) -> None:
    errors: dict[int, Exception] = {1: KeyError("label"), 2: OSError("disk"), 3: OSError("disk")}
    report = check_data(DataLoader(Broken(errors), batch_size=4, num_workers=workers))
    said = {f.what: f.indices for f in report if f.kind == "error"}
    assert said == {
        "Reading 1 sample raises KeyError: 'label'.": (1,),
        "Reading 2 samples raises OSError: disk.": (2, 3),
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stop_iteration_that_would_end_the_epoch_is_found(workers: int) -> None:
    loader = DataLoader(Broken({21: StopIteration()}), batch_size=4, num_workers=workers)
    assert len(list(loader)) == 5  # of 10, without a word
    report = check_data(loader)
    error = found(report, "error")
    assert error.indices == (21,)
    assert "ends the epoch in silence" in error.what
    assert report.rows == 39


def test_an_error_of_the_collate_function_is_told_as_such() -> None:
    def collate(rows: list[tuple[Tensor, int]]) -> Tensor:
        if rows[0][1] == 2:
            raise RuntimeError("cannot stack")
        return torch.stack([x for x, _ in rows])

    report = check_data(DataLoader(Broken({}), batch_size=4, collate_fn=collate))
    assert report.batches == 7
    error = found(report, "error")
    assert error.where == "loader"
    assert "RuntimeError: cannot stack" in error.what
    assert "it is the collate function" in error.what
    assert error.indices == ()


DYING = """
import os
from torch.utils.data import DataLoader
from stayfinite.prevent.data import check_data

class Dying:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index if index != 5 else os._exit(3)

if __name__ == "__main__":
    report = check_data(DataLoader(Dying(), batch_size=2, num_workers=1))
    print([finding.what for finding in report if finding.kind == "stopped"], report.batches)
"""


def test_a_worker_that_dies_ends_the_check_not_the_process() -> None:
    # In a process of its own: torch raises from a signal handler, wherever python is.
    done = subprocess.run(
        [sys.executable, "-c", DYING],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    # However its end was noticed: by the signal, or at the queue or a socket, on a busy machine.
    assert "exited unexpectedly" in done.stdout
    assert done.stdout.split()[-1] in ("0", "1", "2")


class Stream(IterableDataset[tuple[Tensor, int]]):
    """Each worker gives its share."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, 40, step):
            yield torch.full((3,), NAN if index == 13 else math_of(index)), index % 3


@pytest.mark.parametrize(("workers", "place"), [(0, (3, 1)), (2, (3, 2))])
def test_a_stream_has_no_indices_but_batches_and_rows(workers: int, place: tuple[int, int]) -> None:
    report = check_data(DataLoader(Stream(), batch_size=4, num_workers=workers))
    finding = found(report, "non_finite")
    assert (finding.indices, finding.places) == ((), (place,))
    assert not report.has_indices
    assert report.rows == 40


def test_a_stream_that_raises_is_a_finding() -> None:
    class Torn(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(6)
            raise OSError("connection lost")

    report = check_data(DataLoader(Torn(), batch_size=2))
    assert found(report, "error").what == "Reading 1 batch raises OSError: connection lost."
    assert report.batches == 3


def test_a_stream_that_always_raises_ends() -> None:
    class Wall:
        def __iter__(self) -> Wall:
            return self

        def __next__(self) -> int:
            raise OSError("no network")

    report = check_data(Wall())
    assert "100 errors in a row" in found(report, "stopped").what


def test_any_iterable_of_batches_will_do() -> None:
    batches = [(torch.ones(4, 2), torch.arange(4)), (torch.full((4, 2), NAN), torch.arange(4))]
    for loader in (batches, iter(batches), (batch for batch in batches)):
        finding = found(check_data(loader), "non_finite")
        assert finding.places == ((1, 0), (1, 1), (1, 2), (1, 3))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(torch.zeros(0, 3)), batch_size=4),
        DataLoader(table(3), batch_size=4, drop_last=True),
        [],
    ],
)
def test_a_loader_without_batches_is_told(loader: Any) -> None:
    report = check_data(loader)
    assert kinds(report) == ["no_batches"]
    assert (report.rows, report.batches) == (0, 0)


def test_memory_does_not_grow_with_healthy_batches() -> None:
    inspection = Inspection()
    generator = torch.Generator().manual_seed(0)
    for number in range(4000):
        x = torch.randn(4, 2, generator=generator)
        inspection.look([x], number=number, indices=list(range(4 * number, 4 * number + 4)))
    # At most 16 largest and smallest of 2 columns and 2 ends are referred to, by their batches.
    assert len(inspection.indices) < 512 + 2 * 16 * 4
    (tensor,) = inspection.tensors.values()
    assert tensor.rows == 16_000
    assert len(tensor.sample.rows) == 512


def test_max_batches_ends_early() -> None:
    report = check_data(DataLoader(table(bad=(2, 50)), batch_size=10), max_batches=3)
    assert (report.batches, report.rows, report.bad_indices) == (3, 30, (2,))


def test_one_pass_lists_the_worst_outliers_and_a_second_all() -> None:
    torch.manual_seed(0)
    data = table(2000)
    outliers = tuple(range(100, 200))
    data.tensors[0][list(outliers), 3] = -9999 - torch.arange(100.0)
    loader = DataLoader(data, batch_size=50, shuffle=True)
    first = found(check_data(loader), "outlier")
    assert first.indices == tuple(range(184, 200))
    assert first.what.startswith("At least 16 rows out of scale in column 3")
    second = found(check_data(loader, passes=2), "outlier")
    assert second.indices == outliers
    assert second.what.startswith("100 rows out of scale in column 3")


def test_a_dataset_that_ignores_its_index_is_found() -> None:
    class Stuck(Dataset[tuple[Tensor, int]]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.linspace(0, 1, 5), index % 2

    report = check_data(DataLoader(Stuck(), batch_size=8))
    assert [(finding.kind, finding.level) for finding in report] == [("same_rows", "high")]


def test_a_batch_of_nothing_but_ignored_labels_is_found() -> None:
    labels = torch.arange(32).reshape(16, 2) % 5
    labels[6:9] = -100
    report = check_data(DataLoader(TensorDataset(torch.randn(16, 3), labels), batch_size=2))
    assert found(report, "all_ignored").indices == (6, 7)
    assert found(report, "ignored_row").indices == (6, 7, 8)
    assert found(report, "all_ignored").level == "high"
    assert found(report, "ignored_row").level == "medium"


def pad(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": ids != 0}


def test_empty_sequences_are_found_in_their_masks() -> None:
    torch.manual_seed(0)
    rows = [torch.randint(1, 50, (length,)) for length in (5, 3, 0, 7, 2, 0, 4, 6)]
    report = check_data(DataLoader(rows, batch_size=2, collate_fn=pad))
    masked = found(report, "masked")
    assert (masked.level, masked.indices) == ("high", (2, 5))


def test_empty_samples_of_a_ragged_batch_are_found() -> None:
    torch.manual_seed(0)
    rows = [torch.rand(length, 3) for length in (5, 3, 0, 7, 2, 1, 4, 6)]
    report = check_data(DataLoader(rows, batch_size=4, collate_fn=list))
    assert found(report, "empty").indices == (2,)


def test_images_among_which_some_were_not_scaled_are_found() -> None:
    torch.manual_seed(0)
    images = torch.rand(100, 3, 8, 8)
    images[[4, 90]] *= 255
    report = check_data(DataLoader(TensorDataset(images), batch_size=10))
    assert found(report, "outlier").indices == (4, 90)


def test_the_last_batch_of_one_is_low() -> None:
    report = check_data(DataLoader(table(33), batch_size=8))
    assert [(finding.level, finding.kind) for finding in report] == [("low", "single")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 0}, "classes is 0; it must be at least 1."),
        ({"max_batches": 0}, "max_batches is 0; it must be at least 1."),
        ({"passes": 3}, "passes is 3; it must be 1 or 2."),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_data([], **options)


def test_what_gives_no_batches_is_refused() -> None:
    with pytest.raises(InputError, match="loader is a int"):
        check_data(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="can be read only once"):
        check_data(iter([]), passes=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bar_is_shown_when_asked_for_and_no_thread_is_left(
    capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    before = threading.active_count()
    check_data(DataLoader(table(), batch_size=10, num_workers=workers), progress=True)
    assert "checking the data" in capfd.readouterr().err
    check_data(DataLoader(table(), batch_size=10, num_workers=workers))
    assert capfd.readouterr().err == ""
    assert threading.active_count() == before
