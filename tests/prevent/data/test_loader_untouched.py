"""After a check training gets what it would have got: the same batches, random numbers, workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from stayfinite.errors import InputError
from stayfinite.prevent.data import check_data


class Noisy(Dataset[Tensor]):
    """Draws from every generator there is, its own too."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(4)
        self.transforms = [random.Random(5), {"old": np.random.RandomState(6)}]
        self.reads = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        first, second = self.transforms
        return torch.tensor(
            [
                float(index),
                float(self.reads),
                torch.rand(()).item(),
                random.random(),
                np.random.rand(),
                torch.rand((), generator=self.torch).item(),
                self.numpy.random(),
                first.random(),  # type: ignore[union-attr]
                second["old"].rand(),  # type: ignore[index]
            ],
            dtype=torch.float64,
        )


class Shuffled(Sampler[int]):
    """Shuffles its own list in place, anew in each epoch, as many samplers of buckets do."""

    def __init__(self, length: int) -> None:
        self.order = list(range(length))
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        random.Random(self.epoch).shuffle(self.order)
        yield from self.order

    def __len__(self) -> int:
        return len(self.order)


def shared_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(9)
    return DataLoader(Noisy(), batch_size=5, shuffle=True, generator=generator)


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(Noisy(), batch_size=5),
    "shuffled": lambda: DataLoader(Noisy(), batch_size=5, shuffle=True),
    "a generator": shared_generator,
    "a sampler's generator": lambda: DataLoader(
        Noisy(),
        batch_size=5,
        sampler=RandomSampler(range(24), generator=torch.Generator().manual_seed(2)),
    ),
    "a sampler with state": lambda: DataLoader(Noisy(), batch_size=5, sampler=Shuffled(24)),
    "a batch sampler with state": lambda: DataLoader(
        Noisy(), batch_sampler=BatchSampler(Shuffled(24), 5, drop_last=True)
    ),
    "weights": lambda: DataLoader(
        Noisy(), batch_size=5, sampler=WeightedRandomSampler(torch.arange(24.0), 30)
    ),
    "one of two ranks": lambda: DataLoader(
        Noisy(), batch_size=5, sampler=DistributedSampler(range(24), num_replicas=2, rank=1)
    ),
    "two workers": lambda: DataLoader(Noisy(), batch_size=5, shuffle=True, num_workers=2),
    "workers that stay": lambda: DataLoader(
        Noisy(), batch_size=5, shuffle=True, num_workers=2, persistent_workers=True
    ),
}


def seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def epochs(loader: Any, count: int = 2) -> list[Tensor]:
    return [batch for _ in range(count) for batch in loader]


def draws() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


@pytest.mark.parametrize("name", LOADERS)
def test_training_gets_the_same_batches_to_the_byte(name: str) -> None:
    seed()
    expected = epochs(LOADERS[name]())
    then = draws()
    seed()
    loader = LOADERS[name]()
    check_data(loader)
    check_data(loader, passes=2)
    given = epochs(loader)
    assert [batch.numpy().tobytes() for batch in given] == [b.numpy().tobytes() for b in expected]
    assert draws() == then


def test_a_check_in_the_middle_of_an_epoch_does_not_disturb_it() -> None:
    seed()
    loader = LOADERS["workers that stay"]()
    expected = epochs(loader)
    seed()
    loader = LOADERS["workers that stay"]()
    iterator = iter(loader)
    given = [next(iterator), next(iterator)]
    check_data(loader)
    given += [*iterator, *loader]
    assert all(map(torch.equal, given, expected))
    assert len(given) == len(expected)


def test_workers_that_stay_are_those_of_before() -> None:
    loader = LOADERS["workers that stay"]()
    epochs(loader, 1)
    iterator, pids = loader._iterator, [worker.pid for worker in loader._iterator._workers]
    check_data(loader)
    assert loader._iterator is iterator
    assert [worker.pid for worker in iterator._workers] == pids
    assert all(worker.is_alive() for worker in iterator._workers)


def test_a_loader_that_was_never_read_has_no_workers_afterwards() -> None:
    loader = LOADERS["workers that stay"]()
    check_data(loader)
    assert loader._iterator is None


def test_the_check_sees_the_batches_of_the_next_epoch() -> None:
    seed()
    data = torch.arange(24.0)
    data[7] = torch.nan
    loader = DataLoader(TensorDataset(data), batch_size=5, shuffle=True)
    ((batch, row),) = check_data(loader)[0].places
    assert list(loader)[batch][0][row].isnan()


def test_an_error_puts_everything_back_too() -> None:
    seed()
    then = draws()
    seed()
    with pytest.raises(InputError, match="no tensor at 'y'"):
        check_data(LOADERS["shuffled"](), targets="y")
    assert draws() == then


class Counting(IterableDataset[int]):
    """Another order in each epoch, which it counts itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        order = list(range(12))
        random.Random(self.epoch).shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 10  # wrong, and torch warns who asked and got more


def test_a_stream_counts_as_before_and_its_length_was_not_asked() -> None:
    expected = torch.cat(epochs(DataLoader(Counting(), batch_size=1))).tolist()
    loader = DataLoader(Counting(), batch_size=1)
    check_data(loader)
    assert torch.cat(epochs(loader)).tolist() == expected


class Resumable(IterableDataset[int]):
    """Goes on where it was, and says where that is."""

    def __init__(self) -> None:
        self.place = [0]

    def __iter__(self) -> Iterator[int]:
        while self.place[0] < 12:
            self.place[0] += 1
            yield self.place[0]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place[0] = state["place"]


def test_a_stream_with_a_state_goes_on_where_it_was() -> None:
    loader = DataLoader(Resumable(), batch_size=1)
    first = next(iter(loader)).item()
    check_data(loader)
    assert [first, *torch.cat(list(loader)).tolist()] == list(range(1, 13))


class Endless(DataLoader[Any]):
    """Keeps one iterator for all epochs, as loaders of detectors do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


class Repeating:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_an_iterator_of_its_own_keeps_its_place(workers: int) -> None:
    data = torch.arange(20.0)
    data[13] = torch.nan

    def loader() -> Endless:
        return Endless(TensorDataset(data), batch_size=4, shuffle=True, num_workers=workers)

    seed()
    expected = [batch[0].nan_to_num(-1) for batch in epochs(loader(), 3)]
    seed()
    other = loader()
    given = epochs(other, 1)
    report = check_data(other)
    assert (report.batches, report.bad_indices) == (5, (13,))
    given += epochs(other, 2)
    assert all(torch.equal(a[0].nan_to_num(-1), b) for a, b in zip(given, expected, strict=True))


def test_a_sampler_that_can_be_read_once_is_refused() -> None:
    loader = DataLoader(range(8), batch_size=2, sampler=(n for n in range(8)))
    with pytest.raises(InputError, match="a generator, cannot be copied"):
        check_data(DataLoader(range(8), batch_sampler=([n] for n in range(8))))
    with pytest.raises(InputError):
        check_data(loader)
    assert len(list(loader)) == 4


def test_a_batch_is_not_changed() -> None:
    x = torch.randn(40, 3)
    x[2, 1] = torch.nan
    kept = x.clone()
    check_data([(x, torch.arange(40))])
    assert torch.equal(x.nan_to_num(7), kept.nan_to_num(7))
    assert x._version == kept._version + 1  # of the assignment above
