"""Data as people have it: nothing above low is found in what is healthy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from stayfinite.prevent.data import DataReport, check_data

ROWS = 512


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def loader(*tensors: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=32, shuffle=True)


def classes(count: int = 10, rows: int = ROWS) -> Tensor:
    return torch.randint(count, (rows,))


def digits() -> Tensor:
    """Strokes in the middle of a black frame, as of MNIST."""
    images = torch.zeros(ROWS, 1, 28, 28)
    for image, (row, column) in zip(images, torch.randint(8, 20, (ROWS, 2)).tolist(), strict=True):
        image[0, row - 3 : row + 3, column - 2 : column + 2] = torch.rand(6, 4)
    return images


def photos() -> Tensor:
    """Smooth colours in a black frame, normalised as ImageNet is."""
    smooth = functional.interpolate(torch.rand(ROWS, 3, 4, 4), size=24, mode="bilinear")
    return (functional.pad(smooth, (4, 4, 4, 4)) - 0.45) / 0.225


def sounds() -> Tensor:
    time, pitch = torch.arange(3000) / 16_000, 80 + 900 * torch.rand(ROWS, 1)
    return 0.5 * torch.rand(ROWS, 1) * torch.sin(2 * math.pi * pitch * time)


def census() -> Tensor:
    """Standardised numbers, capital gains that are nearly all 0, and a one-hot occupation."""
    gains = torch.where(torch.rand(ROWS) < 0.08, (8 + torch.randn(ROWS)).exp(), torch.zeros(()))
    gains[7] = 99_999
    gains = (gains - gains.mean()) / gains.std()
    occupation = functional.one_hot(torch.randint(38, (ROWS,)), 40).float()  # two never occur
    return torch.cat([torch.randn(ROWS, 5), gains.unsqueeze(1), occupation], dim=1)


def amounts() -> Tensor:
    """Log-normal and standardised: a few values of 20 standard deviations."""
    raw = (1.5 * torch.randn(4 * ROWS, 6)).exp()
    return (raw - raw.mean(0)) / raw.std(0)


def padded_signals() -> Tensor:
    lengths = torch.randint(5, 21, (ROWS, 1, 1))
    return torch.randn(ROWS, 24, 8) * (torch.arange(24)[:, None] < lengths)


def assert_nothing(report: DataReport) -> None:
    assert list(report) == [], str(report)


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(digits, id="digits"),
        pytest.param(lambda: digits().flatten(1), id="flat digits"),
        pytest.param(lambda: (digits() * 255).byte(), id="digits in bytes"),
        pytest.param(lambda: (digits() - 0.13) / 0.31, id="normalised digits"),
        pytest.param(lambda: digits().permute(0, 2, 3, 1), id="digits, channels last"),
        pytest.param(photos, id="photos"),
        pytest.param(sounds, id="sounds"),
        pytest.param(lambda: sounds().unsqueeze(1), id="sounds with a channel"),
        pytest.param(lambda: -80 * torch.rand(ROWS, 40, 30), id="spectrograms in decibels"),
        pytest.param(census, id="census"),
        pytest.param(lambda: torch.randn(ROWS, 12), id="standardised"),
        pytest.param(lambda: torch.rand(ROWS, 12), id="between 0 and 1"),
        pytest.param(lambda: torch.distributions.StudentT(3.0).sample((ROWS, 8)), id="heavy"),
        pytest.param(lambda: (torch.rand(ROWS, 300) < 0.03).float(), id="fingerprints"),
        pytest.param(lambda: torch.rand(ROWS, 40) < 0.1, id="booleans"),
        pytest.param(lambda: torch.poisson((3 * torch.rand(90) ** 4).repeat(ROWS, 1)), id="counts"),
        pytest.param(padded_signals, id="padded signals"),
        pytest.param(lambda: torch.randint(2, 30_000, (ROWS, 20)), id="tokens"),
        pytest.param(lambda: torch.randn(ROWS, 12).half(), id="half precision"),
        pytest.param(lambda: torch.randn(ROWS, 12, dtype=torch.complex64), id="complex"),
        pytest.param(lambda: torch.randn(ROWS, 9), id="coordinates"),
    ],
)
def test_healthy_inputs_give_no_finding(inputs: Any) -> None:
    x = inputs()
    assert_nothing(check_data(loader(x, classes(rows=len(x))), classes=10))


def test_amounts_with_long_tails_give_no_finding() -> None:
    x = amounts()
    assert_nothing(check_data(loader(x, classes(rows=len(x))), classes=10))


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param(lambda: torch.randn(ROWS), id="regression"),
        pytest.param(lambda: 50 + 30 * torch.randn(ROWS, 3), id="many numbers"),
        pytest.param(lambda: (torch.rand(ROWS, 20) < 0.1).float(), id="many labels"),
        pytest.param(lambda: (torch.rand(ROWS, 20) < 0.1).long(), id="many labels, whole"),
        pytest.param(lambda: torch.rand(ROWS, 20) < 0.1, id="many labels, boolean"),
        pytest.param(lambda: functional.one_hot(classes(), 10), id="one-hot"),
        pytest.param(lambda: torch.rand(ROWS, 10).softmax(-1), id="soft labels"),
        pytest.param(lambda: 640 * torch.rand(ROWS, 4), id="boxes in pixels"),
        pytest.param(lambda: classes(2).float(), id="binary"),
        pytest.param(lambda: torch.where(torch.rand(ROWS) < 0.1, -100, classes()), id="ignored"),
    ],
)
def test_healthy_targets_give_no_finding(targets: Any) -> None:
    assert_nothing(check_data(loader(torch.randn(ROWS, 6), targets()), classes=10))


def test_healthy_segmentation_gives_no_finding() -> None:
    masks = torch.randint(21, (64, 16, 16))
    masks[:, :2] = 255  # the border belongs to nobody
    report = check_data(loader(torch.randn(64, 3, 16, 16), masks), classes=21, ignore_index=255)
    assert_nothing(report)


def test_healthy_detection_gives_no_finding() -> None:
    def sample(number: int) -> tuple[Tensor, dict[str, Tensor]]:
        boxes = 400 * torch.rand(number % 4, 4)
        labels = torch.randint(1, 91, (number % 4,))
        image = torch.rand(3, 20 + number % 5, 24)
        return image, {"boxes": boxes, "labels": labels, "image_id": torch.tensor(10_000 + number)}

    data = [sample(number) for number in range(64)]
    pairs = DataLoader(data, batch_size=8, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    assert_nothing(check_data(pairs, classes=91))


def texts(lengths: list[int]) -> list[Tensor]:
    return [torch.randint(1, 500, (length,)) for length in lengths]


def encoded(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = pad_sequence(rows, batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "token_type_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(ids.shape[1]).expand(ids.shape),
        "labels": ids.masked_fill(ids == 0, -100),
    }


def test_healthy_language_models_give_no_finding() -> None:
    rows = texts(torch.randint(3, 40, (200,)).tolist())
    assert_nothing(check_data(DataLoader(rows, batch_size=8, collate_fn=encoded), classes=500))


@pytest.mark.parametrize("keeps", [True, False])
def test_healthy_padding_masks_without_a_name_give_no_finding(keeps: bool) -> None:
    def collate(rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        ids = pad_sequence(rows, batch_first=True)
        return ids, (ids != 0) == keeps, torch.ones(len(rows))

    rows = texts(torch.randint(3, 40, (200,)).tolist())
    report = check_data(DataLoader(rows, batch_size=8, collate_fn=collate))
    assert [finding.level for finding in report if finding.kind != "same_rows"] == []


def test_healthy_additive_masks_give_no_finding() -> None:
    mask = torch.zeros(ROWS, 9).masked_fill(
        torch.arange(9) > torch.randint(9, (ROWS, 1)), -torch.inf
    )
    causal = torch.full((9, 9), -torch.inf).triu(1).expand(ROWS, 9, 9)
    x = torch.randn(ROWS, 9, 4)
    assert_nothing(check_data(loader(x, mask, causal, classes())))


def test_masked_language_modelling_rows_without_a_masked_token_are_low() -> None:
    labels = torch.where(torch.rand(ROWS, 12) < 0.15, torch.randint(500, (ROWS, 12)), -100)
    report = check_data(loader(torch.randint(500, (ROWS, 12)), labels), classes=500)
    assert [(finding.level, finding.kind) for finding in report] == [("low", "ignored_row")]


def test_a_third_field_of_a_tuple_is_not_taken_for_labels() -> None:
    report = check_data(loader(torch.randn(ROWS, 4), classes(5), torch.arange(ROWS)), classes=5)
    assert_nothing(report)


def test_a_column_of_ones_is_low() -> None:
    report = check_data(
        loader(torch.cat([torch.randn(ROWS, 4), torch.ones(ROWS, 1)], 1), classes())
    )
    assert [(f.level, f.kind, f.evidence["first"]) for f in report] == [("low", "constant", 4)]


def test_flat_pictures_with_a_frame_that_is_not_zero_are_low() -> None:
    report = check_data(loader(((digits() - 0.13) / 0.31).flatten(1), classes()))
    assert {finding.level for finding in report} <= {"low"}


def test_missing_targets_are_told_with_their_count() -> None:
    y = torch.randn(ROWS, 6)
    y[torch.rand(ROWS, 6) < 0.6] = torch.nan
    report = check_data(loader(torch.randn(ROWS, 8), y, torch.poisson(torch.rand(ROWS))))
    (finding,) = report
    assert (finding.level, finding.where, finding.kind) == ("medium", "batch.1", "non_finite")
    assert finding.evidence["nan"] == int(y.isnan().sum())
    assert finding.indices == tuple(y.isnan().any(1).nonzero().flatten().tolist())
    assert "exclude them from the loss" in finding.fix
