"""A loader in place of the user's: the same batches in the same order, with their indices."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from stayfinite.prevent.data.leaves import size_of
from stayfinite.prevent.data.untouched import spare_sampler


class RecordedIndices:
    """A sampler that remembers what it has given out and no batch was got for."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler
        self.waiting: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        for item in self._sampler:
            self.waiting.append(item)
            yield item

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)


class Twin:
    """Reads the dataset of a loader as the loader would, without touching it.

    The loader itself is never iterated: its workers, its iterator and its sampler stay as they
    are. Where a subclass has an iteration of its own it `may_repeat`, without an end.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._recorded: RecordedIndices | None = None
        if not isinstance(loader.dataset, IterableDataset):
            self._recorded = RecordedIndices(spare_sampler(loader))
        self.loader = _twin(loader, self._recorded)
        self.may_repeat = type(loader).__iter__ is not DataLoader.__iter__
        self._takes_one = False

    @property
    def has_indices(self) -> bool:
        return self._recorded is not None

    @property
    def is_row_known(self) -> bool:
        """Whether the n-th row of a batch is sure to be its n-th index.

        A collate function of the user's may sort, drop, pack or mix.
        """
        is_batched = self._loader.batch_sampler is not None
        return self._takes_one or (is_batched and self._loader.collate_fn is default_collate)

    @property
    def is_waiting(self) -> bool:
        """Whether the sampler has given indices for which there was no batch."""
        return self._recorded is not None and bool(self._recorded.waiting)

    def forget_length(self) -> None:
        """A length that was asked for makes torch warn about iterable datasets that are longer."""
        vars(self.loader)["_IterableDataset_len_called"] = None

    def next_indices(self, batch: Any = None) -> list[Any] | None:
        """The indices of the next batch, in the order of the sampler; None if they are not known.

        Without automatic batching one index may stand for all rows of the batch.
        """
        if self._recorded is None or not self._recorded.waiting:
            return None
        item = self._recorded.waiting.popleft()
        item = item.tolist() if hasattr(item, "tolist") else item
        if self._loader.batch_sampler is None and not isinstance(item, list | tuple):
            self._takes_one = True
            return [item] * (size_of(batch) or 1)
        if set(map(type, item)) == {int}:
            return list(item)
        return [each.item() if hasattr(each, "item") else each for each in item]

    def reading(
        self, wanted: Sequence[Sequence[Any]], collate: Callable[[Any], Any] | None = None
    ) -> DataLoader[Any]:
        """A loader of these batches of indices, with the same workers."""
        items = [each[0] for each in wanted] if self._takes_one else list(wanted)
        loader = _twin(self._loader, items)
        if collate is not None:
            vars(loader)["collate_fn"] = collate
        return loader


def _twin(loader: DataLoader[Any], sampler: Any | None) -> DataLoader[Any]:
    twin = copy.copy(loader)
    own = vars(twin)  # a loader refuses to have its sampler set
    own.update(_iterator=None, persistent_workers=False, pin_memory=False, in_order=True)
    own.update(_IterableDataset_len_called=None)
    if sampler is not None:
        own["sampler" if loader.batch_sampler is None else "batch_sampler"] = sampler
    return twin
