"""How fast checkpoints are checked, saved and loaded, against safetensors and torch.

    python benchmarks/checkpoint.py [--json] [--megabytes N] [--rounds N] [--threads N]

`check` compares every checksum of our own files, whose seal says what the values are, and looks at
every value of others'. It is measured against reading the same file with safetensors. load_file
only maps a file, so reading is load_file and a copy of each tensor into memory: "kept", where all
copies stay, as for a model that is loaded, and "dropped", where each goes when the next one comes,
which spares most of the memory's own cost. The bar is against the faster of the two. torch and
`check` have the same number of threads, one unless said otherwise.

"cold" is a file that the page cache has forgotten, as a checkpoint of last week; "cached" one that
was just written. "states" is a transformer with its Adam state, of many tensors, most of them
small; "tiny" has thousands of tensors of 4 kB. All contestants take turns in every round; figures
are medians of the rounds. A ratio is a speed: more than 1 is faster than what it is compared with.
Saving is to the disk with fsync and is read back from it; torch.save is shown with fsync too.
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
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn

from stayfinite.checkpoint import load_checkpoint, save_checkpoint, stream
from stayfinite.checkpoint.format import digest
from stayfinite.checkpoint.inspect import check

BAR = 0.8
CHECK = "stayfinite check"
PEERS = ("safetensors, kept", "safetensors, dropped")
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


def transformer_of(megabytes: int) -> tuple[nn.Module, Any]:
    """A transformer and its optimizer, which together have about so many bytes."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    size = sum(p.nbytes for p in layer.parameters()) * 3
    model = nn.TransformerEncoder(layer, max(1, megabytes * 1_000_000 // size))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def tiny_of(megabytes: int) -> nn.Module:
    count = max(1, megabytes * 1_000_000 // 4096)
    return nn.ParameterList(nn.Parameter(torch.randn(1024)) for _ in range(count))


def read_and_keep(path: Path) -> None:
    _ = {name: tensor.clone() for name, tensor in load_file(path).items()}


def read_and_drop(path: Path) -> None:
    for tensor in load_file(path).values():
        tensor.clone()


def checking(path: Path, *, is_cold: bool = False) -> Contestants:
    runs = (lambda: read_and_keep(path), lambda: read_and_drop(path), lambda: check(path))
    forget = path if is_cold else None
    return {
        name: Timed(run, forget=forget) for name, run in zip((*PEERS, CHECK), runs, strict=True)
    }


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
    data = torch.randint(0, 256, (DIGESTED,), dtype=torch.uint8).numpy()
    return {
        "xxh3_128 (ours)": Timed(lambda: digest(data)),
        "zlib.crc32": Timed(lambda: zlib.crc32(data)),
        "sha256": Timed(lambda: hashlib.sha256(data)),
        "blake2b": Timed(lambda: hashlib.blake2b(data)),
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
    middle = {name: median(times) for name, times in timings(entries, rounds).items()}
    peers = [middle[name] for name in PEERS if name in middle]
    compared = min(peers) if peers else next(iter(middle.values()))
    return [
        {
            "group": group,
            "contestant": name,
            "milliseconds": seconds * 1e3,
            "gigabytes_per_second": size / seconds / 1e9,
            "ratio": compared / seconds,
            "bar": BAR if name == CHECK and not group.endswith("tiny") else None,
        }
        for name, seconds in middle.items()
    ]


def measure_checks(megabytes: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        name, path = str(dtype).removeprefix("torch."), folder / "ours.ckpt"
        save_checkpoint(path, model=model_of(megabytes, dtype))
        for kind in ("cold", "cached"):
            entries = checking(path, is_cold=kind == "cold")
            rows += measure(f"check, {kind}, {name}", entries, path.stat().st_size, rounds)
    model, optimizer = transformer_of(megabytes)
    save_checkpoint(path, model=model, optimizer=optimizer)
    rows += measure("check, cached, states", checking(path), path.stat().st_size, rounds)
    save_checkpoint(path, model=tiny_of(megabytes // 8))
    rows += measure("check, cached, tiny", checking(path), path.stat().st_size, rounds)
    path = folder / "theirs.safetensors"
    save_file(model_of(megabytes, torch.float32).state_dict(), path)
    rows += measure("check, cached, safetensors", checking(path), path.stat().st_size, rounds)
    return rows


def measure_all(megabytes: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    rows = measure_checks(megabytes, rounds, folder)
    model = model_of(megabytes, torch.bfloat16)
    save_checkpoint(folder / "ours.ckpt", model=model)
    size, fewer = (folder / "ours.ckpt").stat().st_size, max(3, rounds // 3)
    rows += measure("save", saving(model, folder), size, fewer)
    rows += measure("load", loading(model, folder), size, fewer)
    rows += measure("checksum", digests(), DIGESTED, rounds)
    return rows


def is_met(row: dict[str, Any]) -> bool:
    return row["bar"] is None or bool(row["ratio"] >= row["bar"])


def table(rows: list[dict[str, Any]], megabytes: int) -> Table:
    shown = Table(title=f"checkpoints of {megabytes} MB")
    for name in ("", "contestant", "ms", "GB/s", "ratio", "bar"):
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
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1, help="for torch, and for our reading")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    stream.MOST_THREADS = options.threads
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_all(options.megabytes, options.rounds, Path(folder))
    if options.json:
        print(json.dumps({"megabytes": options.megabytes, "rows": rows}, indent=1))
    else:
        Console().print(table(rows, options.megabytes))
    return 0 if all(map(is_met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
