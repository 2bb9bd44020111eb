"""Batches by the samples that are in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import stayfinite
from stayfinite.locate.samples import Deliveries, Reads


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), float(index))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(6, 2))


@pytest.fixture
def heard() -> Iterator[list[tuple[int, Any, Any]]]:
    found: list[tuple[int, Any, Any]] = []
    deliveries = Deliveries(lambda d, batch: found.append((d.number, d.indices, batch)))
    attachment = deliveries.watch()
    yield found
    attachment.remove()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_batch_comes_with_the_indices_of_its_rows(
    heard: list[Any], workers: int, shuffle: bool
) -> None:
    torch.manual_seed(3)
    for _ in DataLoader(Numbers(), batch_size=3, shuffle=shuffle, num_workers=workers):
        pass
    assert [number for number, _, _ in heard] == [0, 1, 2, 3]
    assert all(batch[:, 0].tolist() == indices for _, indices, batch in heard)


def test_workers_that_persist_begin_anew_after_a_break(heard: list[Any]) -> None:
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, persistent_workers=True)
    for _ in loader:
        break
    for _ in loader:
        pass
    assert all(batch[:, 0].tolist() == indices for _, indices, batch in heard)
    assert len(heard) == 6


def test_loaders_inside_one_another_are_told_apart(heard: list[Any]) -> None:
    inner = DataLoader(Numbers(), batch_size=4)
    for _ in DataLoader(Numbers(), batch_size=5):
        list(inner)
    assert all(batch[:, 0].tolist() == indices for _, indices, batch in heard)
    assert len(heard) == 8


def test_an_index_of_a_subset_is_one_of_the_whole_dataset(heard: list[Any]) -> None:
    part = Subset(Subset(Numbers(), [9, 7, 5, 3]), [2, 1])
    list(DataLoader(part, batch_size=2))
    assert heard[0][1] == [5, 7]


def test_a_stream_has_no_indices(heard: list[Any]) -> None:
    list(DataLoader(Stream(), batch_size=2))
    assert [(number, indices) for number, indices, _ in heard] == [(0, None), (1, None), (2, None)]


def test_a_batch_that_was_moved_is_the_last_one_of_a_plain_loader() -> None:
    deliveries = Deliveries()
    attachment = deliveries.watch()
    first, second, *_ = list(DataLoader(Numbers(), batch_size=2))
    found = deliveries.of({"x": second}), deliveries.of((first,)), deliveries.of(first.clone())
    numbers = [each.number for each in found if each is not None]
    attachment.remove()
    assert numbers == [1, 0, 4]


class Files(Dataset[Tensor]):
    def __init__(self, folder: Path, count: int) -> None:
        self.paths = [folder / f"scan_{number}.npy" for number in range(count)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.load(self.paths[index]))


def evidence_of(loader: Any, loss: Any = None) -> tuple[str, ...]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    with stayfinite.trace(raise_on_nan=False) as block:
        for batch in loader:
            out = model(batch[0] if isinstance(batch, list) else batch)
            (out.mean() if loss is None else loss(out, batch)).backward()
    diagnosis = block.incidents[0].diagnosis
    assert diagnosis is not None
    return diagnosis.evidence


def test_the_file_of_a_bad_sample_is_named(tmp_path: Path) -> None:
    files = Files(tmp_path, 12)
    for number, path in enumerate(files.paths):
        values = np.ones(3, dtype=np.float32)
        values[1] = np.nan if number == 7 else 1.0
        np.save(path, values)
    (said,) = evidence_of(DataLoader(files, batch_size=4))
    assert "sample 7 of the dataset (row 3 of 4 in batch 1)" in said
    assert "scan_7.npy" in said
    assert "scan_8" not in said


def test_what_python_imports_from_is_no_file_of_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, table = tmp_path / "python311.zip", tmp_path / "table.csv"
    for path in (packed, table):
        path.write_text("1")
    monkeypatch.syspath_prepend(str(packed))
    reads = Reads()
    reads.listen()
    table.read_text()
    packed.read_text()
    reads.stop()
    assert reads.latest() == str(table)


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_rows_are_named_by_their_samples(workers: int) -> None:
    table = torch.ones(20, 3)
    table[13, 1] = float("inf")
    table[14, 0] = float("nan")
    loader = DataLoader(TensorDataset(table), batch_size=5, num_workers=workers)
    said = " ".join(evidence_of(loader))
    assert "samples 13 and 14 of the dataset TensorDataset (rows 3 and 4 of 5 in batch 2)" in said


def test_a_value_that_the_model_makes_bad_names_its_row() -> None:
    table = torch.ones(20, 3)
    table[11] = -5.0

    def loss(out: Tensor, batch: Any) -> Tensor:
        return (torch.log(batch[0] + 1.0) * out).mean()

    said = " ".join(evidence_of(DataLoader(TensorDataset(table), batch_size=5), loss))
    assert "sample 11 of the dataset TensorDataset (row 1 of 5 in batch 2)" in said


def test_a_table_without_a_loader_is_named_by_its_row() -> None:
    table = torch.from_numpy(np.ones((30, 3), dtype=np.float32))
    table[21] = float("nan")
    said = evidence_of(table[start : start + 6] for start in range(0, 30, 6))
    assert any("row 21 of the tensor [30, 3] is bad" in each for each in said)


def test_when_every_row_is_bad_and_the_data_is_not_to_blame_no_sample_is_named() -> None:
    loader = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=4)
    said = evidence_of(loader, lambda out, batch: torch.log(out * 0.0).mean())
    assert not any("sample" in sentence for sentence in said)
