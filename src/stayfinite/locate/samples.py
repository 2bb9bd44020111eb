"""Which samples of a dataset are in a batch that a DataLoader has delivered."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils.data import Subset
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stayfinite.detect.entrypoints import together, wrapped
from stayfinite.detect.hooks import Attachment
from stayfinite.detect.walk import named_tensors

logger = logging.getLogger("stayfinite")
_REMEMBERED = 8
_FETCH = fetch.__file__
_SOURCE = "_stayfinite_source"  # on an iterator, and gone with it


class Source:
    """What an iterator of a loader reads, and the indices that it has asked for."""

    __slots__ = ("_dataset", "asked", "is_plain", "kind")

    def __init__(self, dataset: Any, *, loader: Any = None) -> None:
        # Other classes of loaders read a batch ahead of the one that they hand over.
        self.is_plain = type(loader).__module__ == "torch.utils.data.dataloader"
        self.kind = type(dataset).__name__
        self.asked: dict[int, Any] = {}  # by the number of the task
        try:
            self._dataset: Callable[[], Any] = weakref.ref(dataset)
        except TypeError:  # a plain list, say
            self._dataset = lambda: None

    @property
    def dataset(self) -> Any:
        """None if it is not known, or there no longer."""
        return self._dataset()


class Delivery:
    """One batch of a loader: its number in the epoch, and the dataset's indices of its rows.

    `indices` is None where they cannot be known: of an iterable dataset, or out of order.
    """

    __slots__ = ("_indices", "number", "source", "tensors")

    def __init__(self, number: int, indices: Any, source: Source, tensors: list[Tensor]) -> None:
        self.number, self._indices, self.source = number, indices, source
        self.tensors = [weakref.ref(tensor) for tensor in tensors]

    @property
    def indices(self) -> list[Any] | None:
        """One for each row, through subsets to the dataset that they are taken from."""
        known = self._indices
        if known is None or not isinstance(known, (list, tuple)) or None in known:
            return None
        return [self.sample(index) for index in known]

    @property
    def dataset(self) -> str:
        """The class of the dataset that the indices count in."""
        inner = self.source.dataset
        while isinstance(inner, Subset):
            inner = inner.dataset
        return self.source.kind if inner is None else type(inner).__name__

    def sample(self, index: Any) -> Any:
        """The index in the innermost dataset."""
        inner = self.source.dataset
        while isinstance(inner, Subset):
            index, inner = inner.indices[index], inner.dataset
        return int(index) if isinstance(index, Tensor) else index


class Deliveries:
    """The last batches of all loaders of this process; `heard` is told of each."""

    def __init__(self, heard: Callable[[Delivery, Any], None] | None = None) -> None:
        self._heard = heard
        self._recent: deque[Delivery] = deque(maxlen=_REMEMBERED)
        self._has_failed = False

    def watch(self) -> Attachment:
        """Listen to every loader; some microseconds for each batch."""
        return together(
            wrapped(_BaseDataLoaderIter, "__init__", self._around_beginning),
            wrapped(_BaseDataLoaderIter, "_reset", self._around_beginning),
            wrapped(_BaseDataLoaderIter, "_next_index", self._around_index),
            wrapped(_BaseDataLoaderIter, "__next__", self._around_next),
            Attachment(self._recent.clear),
        )

    def recent(self) -> list[tuple[Delivery, list[Tensor]]]:
        """The last deliveries with those of their tensors that are still alive."""
        return [
            (delivery, [tensor for ref in delivery.tensors if (tensor := ref()) is not None])
            for delivery in self._recent
        ]

    def of(self, batch: Any, *, exactly: bool = False) -> Delivery | None:
        """The delivery whose tensors are in the batch.

        A batch of other tensors, moved to a device say, is the last one of a loader that reads
        no batch ahead; with `exactly`, none is.
        """
        ours = {id(tensor) for _, tensor in named_tensors(batch, "")}
        for delivery in reversed(self._recent):
            if any(id(tensor()) in ours for tensor in delivery.tensors if tensor() is not None):
                return delivery
        latest = self._recent[-1] if self._recent and not exactly else None
        return latest if latest is not None and latest.source.is_plain else None

    def _around_beginning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
            vars(iterator)[_SOURCE] = Source(loader.dataset, loader=loader)
            return original(iterator, loader, *args, **kwargs)

        return begin

    def _around_index(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def next_index(iterator: Any) -> Any:
            index = original(iterator)
            _source(iterator).asked[_task(iterator)] = index
            return index

        return next_index

    def _around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def advance(iterator: Any) -> Any:
            batch = original(iterator)
            try:
                self._delivered(iterator, batch)
            except Exception:
                if not self._has_failed:
                    self._has_failed = True
                    logger.warning("the samples of a batch could not be told", exc_info=True)
            return batch

        return advance

    def _delivered(self, iterator: Any, batch: Any) -> None:
        source = _source(iterator)
        indices = source.asked.pop(_received(iterator), None)
        delivery = Delivery(iterator._num_yielded - 1, indices, source, _outer_tensors(batch))
        self._recent.append(delivery)
        if self._heard is not None:
            self._heard(delivery, batch)


def _source(iterator: Any) -> Source:
    """Of an iterator that was there before we were, less is known."""
    known = vars(iterator)
    if _SOURCE not in known:
        known[_SOURCE] = Source(getattr(iterator, "_dataset", None))
    source: Source = known[_SOURCE]
    return source


def _task(iterator: Any) -> int:
    sent = getattr(iterator, "_send_idx", None)  # only where there are workers
    return int(iterator._num_yielded if sent is None else sent)


def _received(iterator: Any) -> int:
    received = getattr(iterator, "_rcvd_idx", None)
    if received is None:
        return int(iterator._num_yielded) - 1
    return int(received) - 1 if getattr(iterator, "_in_order", True) else -1


def _outer_tensors(batch: Any) -> list[Tensor]:
    """Those of the batch and of the boxes in it; what lies deeper is left out for speed."""
    if isinstance(batch, Tensor):
        return [batch]
    outer = batch.values() if hasattr(batch, "values") else batch
    if not isinstance(outer, (list, tuple)) and outer is batch:
        return []
    return [item for item in outer if isinstance(item, Tensor)]


def sample_under_way(frame: FrameType | None) -> Any:
    """The index of the sample that a loader is reading in this process; None outside of that."""
    while frame is not None:
        if frame.f_code.co_filename == _FETCH:
            found = frame.f_locals.get("idx")
            if found is None and "possibly_batched_index" in frame.f_locals:
                index = frame.f_locals["possibly_batched_index"]
                found = None if isinstance(index, (list, tuple)) else index
            return found
        frame = frame.f_back
    return None
