"""Which batch is the first bad one, and which checkpoint."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from scenes import Net, Unstable, guarded
from torch import Tensor, nn

import stayfinite
from stayfinite.errors import InputError
from stayfinite.locate.batches import first_bad_checkpoint

INPUT = torch.ones(4, 3)


def batches(bad: int | None, count: int = 6) -> list[tuple[Tensor, Tensor]]:
    made = [(torch.ones(2, 3), torch.zeros(2, 1)) for _ in range(count)]
    if bad is not None:
        made[bad][0][1, 2] = math.inf
    return made


@pytest.mark.parametrize("bad", [0, 4])
def test_first_bad_batch_is_given_with_its_place(bad: int, untouched: Any) -> None:
    net = Net()
    is_same = untouched(net)
    loader = batches(bad)
    found = stayfinite.find_first_bad_batch(net, loader, nn.functional.mse_loss)
    assert is_same()
    assert found.index == bad
    assert found.batch is loader[bad]
    assert found.reports[0].location == "inputs.0"
    assert "inputs.0 holds inf values" in found.reason
    assert found.origin.phase == "data"


def test_batch_with_finite_values_is_named_by_the_operation() -> None:
    model = Unstable()
    loader = [torch.ones(4, 3), torch.zeros(4, 3)]
    found = stayfinite.find_first_bad_batch(model, loader)
    assert (found.index, found.reports) == (1, ())
    assert found.reason.startswith("aten.log.default at ")
    assert found.origin.facts["expression"] == "torch.log(x)"


def test_no_bad_batch_is_none_and_leaves_all_as_before(untouched: Any) -> None:
    model = Unstable()
    is_same = untouched(model)
    assert stayfinite.find_first_bad_batch(model, [INPUT, INPUT]) is None
    assert stayfinite.find_first_bad_batch(model, []) is None
    assert is_same()


def test_only_so_many_batches_are_tried() -> None:
    net = Net()
    loss = nn.functional.mse_loss
    assert stayfinite.find_first_bad_batch(net, batches(4), loss, num_batches=4) is None
    assert stayfinite.find_first_bad_batch(net, batches(4), loss, num_batches=5).index == 4
    endless = (pair for _ in iter(int, 1) for pair in batches(None))
    assert stayfinite.find_first_bad_batch(net, endless, loss, num_batches=3) is None


def test_every_batch_is_tried_on_the_same_weights_and_random_numbers() -> None:
    seen: list[float] = []

    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(float(torch.rand(())))
            return x * self.weight

    stayfinite.find_first_bad_batch(Random(), [INPUT] * 3)
    assert len(set(seen)) == 1


def test_data_loader_with_workers_off_is_read_in_order() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(12.0).view(12, 1) - 6.0)
    loader = torch.utils.data.DataLoader(data, batch_size=3)

    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x + 10.0) * (x < 0) + torch.log(4.0 - x) * (x >= 0)

    assert stayfinite.find_first_bad_batch(Log(), loader).index == 3


def test_first_bad_batch_refuses_what_is_no_model() -> None:
    with pytest.raises(InputError, match="model is a int"):
        stayfinite.find_first_bad_batch(3, [])  # type: ignore[arg-type]


def test_it_can_be_asked_while_a_guard_watches() -> None:
    with guarded(on_nan="warn") as guard:
        assert stayfinite.find_first_bad_batch(Net(), batches(1), nn.functional.mse_loss).index == 1
    assert guard.steps >= 0


def series(folder: Path, bad_from: int, *, count: int = 9, suffix: str = ".pt") -> list[Path]:
    paths = []
    for number in range(count):
        path = folder / f"step{number}{suffix}"
        value = math.nan if number >= bad_from else 1.0
        state = {"weight": torch.tensor([1.0, value]), "bias": torch.ones(2)}
        save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
        os.utime(path, ns=(number * 10**9, number * 10**9))
        paths.append(path)
    return paths


@pytest.mark.parametrize("bad_from", range(5))
@pytest.mark.parametrize("count", [1, 4])
def test_first_bad_checkpoint_is_found(tmp_path: Path, bad_from: int, count: int) -> None:
    paths = series(tmp_path, bad_from, count=count)
    expected = paths[bad_from] if bad_from < count else None
    assert first_bad_checkpoint(tmp_path) == expected
    assert first_bad_checkpoint([str(path) for path in paths]) == expected


def test_safetensors_are_read_too(tmp_path: Path) -> None:
    paths = series(tmp_path, 3, count=5, suffix=".safetensors")
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    assert first_bad_checkpoint(tmp_path) == paths[3]


def test_few_files_are_read(tmp_path: Path) -> None:
    read: list[Path] = []

    def is_bad(path: Path) -> bool:
        read.append(path)
        return int(path.name) >= 700

    assert first_bad_checkpoint([str(n) for n in range(1000)], is_bad) == Path("700")
    assert len(read) <= 12


def test_empty_folder_has_no_bad_checkpoint(tmp_path: Path) -> None:
    assert first_bad_checkpoint(tmp_path) is None
    assert first_bad_checkpoint([]) is None


def test_wrong_folder_and_broken_file_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        first_bad_checkpoint(tmp_path / "nowhere")
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match=r"broken\.pt cannot be read"):
        first_bad_checkpoint(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        first_bad_checkpoint([tmp_path / "missing.safetensors"])


class Exploit:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("exploited",))


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(1), "code": Exploit()}, tmp_path / "evil.pt")
    with pytest.raises(InputError):
        first_bad_checkpoint(tmp_path)
    assert not (tmp_path / "exploited").exists()
