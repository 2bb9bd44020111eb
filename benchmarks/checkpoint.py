"""How fast checkpoints are checked, saved and loaded, against safetensors and torch.

    python benchmarks/checkpoint.py [--json] [--megabytes N] [--rounds N]

`check` verifies every checksum and looks at every value. It is measured against reading the same
file with safetensors into memory: load_file, which only maps the file, and a copy of each tensor.
"cold" is a file that the page cache has forgotten, as a checkpoint of last week; "cached" one that
was just written. All contestants take turns in every round; figures are the best round of each,
since the others have other people's work in them. A ratio is a speed: more than 1 is faster than
the first of its group. Saving is to the disk with fsync, and is read back from it; torch.save is
shown with fsync too. torch has one thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import nn

from stayfinite.checkpoint import load_checkpoint, save_checkpoint
from stayfinite.checkpoint.checking import check
from stayfinite.checkpoint.format.digests import digest

BAR = 0.8
CHECK = "stayfinite check"
TENSOR = 4_000_000
DIGESTED = 64_000_000


@dataclass(frozen=True)
class Timed:
    """What is timed, and a file that the page cache forgets before."""

    run: Callable[[], Any]
    forget: Path | None = None


Contestants = dict[str, Timed]


def model_of(megabytes: int, dtype: torch.dtype) -> nn.Module:
    count = max(1, megabytes * 1_000_000 // (TENSOR * dtype.itemsize))
    return nn.ParameterList(
        nn.Parameter(torch.randn(TENSOR).to(dtype), requires_grad=False) for _ in range(count)
    )


def read_into_memory(path: Path) -> None:
    for tensor in load_file(path).values():
        tensor.clone()


def read_where_it_is(path: Path) -> None:
    for tensor in load_file(path).values():
        tensor.view(torch.int32).sum()


def checking(path: Path, *, is_cold: bool) -> Contestants:
    entries = {
        "safetensors: load_file into memory": lambda: read_into_memory(path),
        CHECK: lambda: check(path),
        "safetensors: load_file, one pass": lambda: read_where_it_is(path),
    }
    return {name: Timed(run, forget=path if is_cold else None) for name, run in entries.items()}


def forget_cached(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def saving(model: nn.Module, folder: Path) -> Contestants:
    def torch_save(*, synced: bool) -> None:
        with (folder / "torch.pt").open("wb") as file:
            torch.save(model.state_dict(), file)
            if synced:
                file.flush()
                os.fsync(file.fileno())

    return {
        "torch.save": Timed(lambda: torch_save(synced=False)),
        "torch.save, and fsync": Timed(lambda: torch_save(synced=True)),
        "save_checkpoint": Timed(lambda: save_checkpoint(folder / "ours.ckpt", model=model)),
    }


def loading(model: nn.Module, folder: Path) -> Contestants:
    ours, theirs = folder / "ours.ckpt", folder / "torch.pt"

    def torch_load() -> None:
        model.load_state_dict(torch.load(theirs, weights_only=True))

    return {
        "torch.load, load_state_dict": Timed(torch_load),
        "load_checkpoint": Timed(lambda: load_checkpoint(ours, model=model)),
        "load_checkpoint of torch's": Timed(
            lambda: load_checkpoint(folder / "torch.pt", model=model)
        ),
    }


def digests() -> Contestants:
    data = torch.randint(0, 256, (DIGESTED,), dtype=torch.uint8)
    raw = data.numpy().data
    return {
        "row and column sums (ours)": Timed(lambda: digest(data)),
        "zlib.crc32": Timed(lambda: zlib.crc32(raw)),
        "sha256": Timed(lambda: hashlib.sha256(raw)),
        "blake2b": Timed(lambda: hashlib.blake2b(raw)),
    }


def timings(entries: Contestants, rounds: int) -> dict[str, list[float]]:
    """Seconds for each in every round, after one round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in entries}
    for number in range(rounds + 1):
        for name, timed in entries.items():
            if timed.forget is not None:
                forget_cached(timed.forget)
            start = time.perf_counter()
            timed.run()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def measure(group: str, entries: Contestants, size: int, rounds: int) -> list[dict[str, Any]]:
    best = {name: min(times) for name, times in timings(entries, rounds).items()}
    first = next(iter(best.values()))
    return [
        {
            "group": group,
            "contestant": name,
            "milliseconds": seconds * 1e3,
            "gigabytes_per_second": size / seconds / 1e9,
            "ratio": first / seconds,
            "bar": BAR if name == CHECK else None,
        }
        for name, seconds in best.items()
    ]


def measure_all(megabytes: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(megabytes, dtype)
        path = folder / "ours.ckpt"
        save_checkpoint(path, model=model)
        name = str(dtype).removeprefix("torch.")
        for kind in ("cold", "cached"):
            entries = checking(path, is_cold=kind == "cold")
            rows += measure(f"check, {kind}, {name}", entries, path.stat().st_size, rounds)
    size = path.stat().st_size
    rows += measure("save", saving(model, folder), size, max(2, rounds // 3))
    rows += measure("load", loading(model, folder), size, max(2, rounds // 3))
    rows += measure("checksum", digests(), DIGESTED, rounds)
    return rows


def is_met(row: dict[str, Any]) -> bool:
    return row["bar"] is None or bool(row["ratio"] >= row["bar"])


def table(rows: list[dict[str, Any]], megabytes: int) -> Table:
    shown = Table(title=f"checkpoints of {megabytes} MB")
    for name in ("", "contestant", "ms", "GB/s", "x the first", "bar"):
        shown.add_column(name, justify="left" if name in ("", "contestant") else "right")
    for place, row in enumerate(rows):
        verdict = "" if row["bar"] is None else f"{row['bar']} {'met' if is_met(row) else 'MISSED'}"
        last = place + 1 == len(rows) or rows[place + 1]["group"] != row["group"]
        shown.add_row(
            row["group"],
            row["contestant"],
            f"{row['milliseconds']:.1f}",
            f"{row['gigabytes_per_second']:.2f}",
            f"{row['ratio']:.2f}",
            verdict,
            end_section=last,
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_all(options.megabytes, options.rounds, Path(folder))
    if options.json:
        print(json.dumps({"megabytes": options.megabytes, "rows": rows}, indent=1))
    else:
        Console().print(table(rows, options.megabytes))
    return 0 if all(map(is_met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
