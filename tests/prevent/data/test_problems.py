"""What check_data gives back: a list of findings, as text and as JSON."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stayfinite.prevent.data import DataFinding, DataReport, check_data
from stayfinite.prevent.risks import Risk
from stayfinite.records import from_json


@pytest.fixture(scope="module")
def report() -> DataReport:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(100, 4, generator=generator), torch.arange(100) % 3
    x[:20, 1] = torch.nan
    x[:, 3] = 1
    y[50] = 7
    return check_data(DataLoader(TensorDataset(x, y), batch_size=10), classes=3)


def test_it_is_a_sequence_of_risks_the_worst_first(report: DataReport) -> None:
    assert len(report) == 3
    assert [finding.level for finding in report] == ["high", "high", "low"]
    assert all(isinstance(finding, Risk) for finding in report)
    assert report[0] is report.findings[0]
    assert report[1:] == report.findings[1:]
    assert report[0] in report


def test_it_is_false_when_nothing_was_found() -> None:
    data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
    clean = check_data(DataLoader(data, batch_size=8))
    assert not clean
    assert clean.is_good
    assert str(clean) == "64 rows in 8 batches: nothing found."


def test_bad_indices_are_those_above_low_each_once(report: DataReport) -> None:
    assert report.bad_indices == (*range(20), 50)
    assert not report.is_good


def test_it_can_be_printed(report: DataReport) -> None:
    lines = str(report).splitlines()
    assert lines[0] == "100 rows in 10 batches: 3 findings, 21 bad samples"
    assert lines[1] == (
        "high: batch.0: 20 NaN of 400 values, in 20 of 100 rows. Every layer turns them into NaN. "
        "Dataset indices 0, 1, 2, 3, 4, 5, 6, 7, ... (20 in all)."
    )
    assert lines[5].startswith("low: batch.0: Column 3 is 1 in all 100 rows.")


def test_it_goes_to_json_and_back(report: DataReport) -> None:
    data = json.loads(report.to_json())
    assert data["rows"] == 100
    assert data["findings"][0]["indices"] == list(range(20))
    assert data["tensors"][0]["path"] == "batch.0"
    again = from_json(DataReport, report.to_json(indent=1))
    assert again.bad_indices == report.bad_indices
    assert [finding.what for finding in again] == [finding.what for finding in report]


def test_it_cannot_be_changed(report: DataReport) -> None:
    with pytest.raises(AttributeError):
        report.rows = 3  # type: ignore[misc]


def test_tensors_are_described(report: DataReport) -> None:
    x, y = report.tensors
    assert (x.role, x.dtype, x.shape, x.rows) == ("input", "float32", (4,), 100)
    assert (y.role, y.dtype, y.shape, y.min, y.max) == ("label", "int64", (), 0, 7)
    assert x.mean == pytest.approx(0.25, abs=0.15)
    assert y.mean is None


def test_only_the_first_hundred_places_are_listed_and_all_indices() -> None:
    x = torch.full((300, 2), torch.nan)
    (finding,) = check_data(DataLoader(TensorDataset(x), batch_size=50))
    assert isinstance(finding, DataFinding)
    assert (len(finding.places), len(finding.indices), finding.rows) == (100, 300, 300)
