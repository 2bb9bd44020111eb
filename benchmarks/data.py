"""What check_data costs, against only iterating the same loader.

    python benchmarks/data.py [--json] [--rounds N] [--workers N]

A ratio of 1.2 means that looking at every batch takes 1.2 times as long as reading it. All loaders
hold their data in memory, which is the hard case: nothing is decoded and no disk is waited for.
The two contestants take turns in every round; figures are medians over the rounds, and a ratio is
the median of the ratios of the rounds. torch has one thread. Without workers it is processor time
that is measured, with workers the time on the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stayfinite.prevent.data import check_data


class Photos(Dataset[tuple[Tensor, int]]):
    """Bytes that become normalised floats when they are read, as after a decoder."""

    def __init__(self, count: int) -> None:
        self.pixels = torch.randint(0, 256, (count, 3, 224, 224), dtype=torch.uint8)
        self.mean = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
        self.std = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return (self.pixels[index].float() / 255 - self.mean) / self.std, index % 10


class Texts(Dataset[Tensor]):
    """Token ids of many lengths."""

    def __init__(self, count: int) -> None:
        lengths = torch.randint(16, 513, (count,)).tolist()
        self.ids = [torch.randint(1, 32_000, (length,)) for length in lengths]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[index]


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def tables(count: int, columns: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, columns), torch.randint(10, (count,)))


def small_pictures(count: int) -> TensorDataset:
    return TensorDataset(torch.rand(count, 1, 28, 28), torch.randint(10, (count,)))


def workloads(workers: int) -> dict[str, DataLoader[Any]]:
    def loader(dataset: Dataset[Any], size: int, collate: Any = None) -> DataLoader[Any]:
        return DataLoader(
            dataset, batch_size=size, shuffle=True, collate_fn=collate, num_workers=workers
        )

    return {
        "table, 32 columns, batches of 256": loader(tables(40_000, 32), 256),
        "table, 784 columns, batches of 128": loader(tables(20_000, 784), 128),
        "pictures 1x28x28, batches of 128": loader(small_pictures(20_000), 128),
        "pictures 3x224x224, batches of 32": loader(Photos(512), 32),
        "tokens up to 512, batches of 32": loader(Texts(8_000), 32, padded),
    }


def timed(run: Callable[[], Any], loader: DataLoader[Any]) -> float:
    clock = time.perf_counter if loader.num_workers else time.process_time
    start = clock()
    run()
    return clock() - start


def read_all(loader: DataLoader[Any]) -> None:
    for _ in loader:
        pass


def measure(name: str, loader: DataLoader[Any], rounds: int) -> dict[str, Any]:
    reading: list[float] = []
    checking: list[float] = []
    for number in range(rounds + 1):
        read = timed(lambda: read_all(loader), loader)
        checked = timed(lambda: check_data(loader, progress=False), loader)
        if number:  # the first round is a warm-up
            reading.append(read)
            checking.append(checked)
    ratios = [ours / theirs for ours, theirs in zip(checking, reading, strict=True)]
    batches = len(loader)
    return {
        "loader": name,
        "batches": batches,
        "reading_ms": statistics.median(reading) * 1e3,
        "checking_ms": statistics.median(checking) * 1e3,
        "added_us_per_batch": statistics.median(
            (ours - theirs) / batches * 1e6 for ours, theirs in zip(checking, reading, strict=True)
        ),
        "ratio": statistics.median(ratios),
    }


def table(rows: list[dict[str, Any]], workers: int) -> Table:
    shown = Table(title=f"check_data against iterating the loader, {workers} workers")
    for name in ("loader", "batches", "reading ms", "checking ms", "added us per batch", "ratio"):
        shown.add_column(name, justify="left" if name == "loader" else "right")
    for row in rows:
        shown.add_row(
            row["loader"],
            f"{row['batches']:,}",
            f"{row['reading_ms']:.0f}",
            f"{row['checking_ms']:.0f}",
            f"{row['added_us_per_batch']:.0f}",
            f"{row['ratio']:.2f}",
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loaders = workloads(options.workers)
    rows = [measure(name, loader, options.rounds) for name, loader in loaders.items()]
    if options.json:
        print(json.dumps({"workers": options.workers, "rows": rows}, indent=1))
    else:
        Console().print(table(rows, options.workers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
