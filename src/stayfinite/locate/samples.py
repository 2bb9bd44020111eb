"""Which samples of a dataset are in a batch, and which files a script reads its data from."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Subset
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stayfinite.detect.hooks import Attachment, together, wrapped
from stayfinite.locate.source import user_places
from stayfinite.nested import named_tensors
from stayfinite.safely import Safely

_REMEMBERED = 8
_FETCH = fetch.__file__
_SOURCE = "_stayfinite_source"  # on an iterator, and gone with it
_LEFT = "_stayfinite_left"


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
    def asked(self) -> list[Any]:
        """What the dataset was asked for, a row each; empty if that is not known."""
        known = self._indices
        return list(known) if isinstance(known, (list, tuple)) and None not in known else []

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
        self._safely = Safely("the samples of a batch could not be found")
        self.again: Callable[[], Any] | None = None
        """Hands over the batches of a step that is run again, in the place of all loaders."""
        self.on_left: Callable[[FrameType], None] | None = None
        """Called when a loop has left a loader's iterator, before its end or there."""
        self._aside: list[tuple[Source, set[Any]]] = []  # samples that are not read again

    def watch(self) -> Attachment:
        """Listen to every loader; some microseconds for each batch."""
        return together(
            wrapped(_BaseDataLoaderIter, "__init__", self._around_beginning),
            wrapped(_BaseDataLoaderIter, "_reset", self._around_beginning),
            wrapped(_BaseDataLoaderIter, "_next_index", self._around_index),
            wrapped(_BaseDataLoaderIter, "__next__", self._around_next),
            Attachment(self._leave),
        )

    def _leave(self) -> None:
        self.on_left = None

    def forget(self) -> None:
        """Nobody asks for the last batches any more."""
        self._recent.clear()
        self._aside.clear()

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
            vars(iterator)[_LEFT] = _Left(self)
            return original(iterator, loader, *args, **kwargs)

        return begin

    def _around_index(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def next_index(iterator: Any) -> Any:
            index = original(iterator)
            if self._aside:
                index = self._without(iterator, index, original)
            sent = getattr(iterator, "_send_idx", None)  # only where there are workers
            task = int(iterator._num_yielded if sent is None else sent)
            _source(iterator).asked[task] = index
            return index

        return next_index

    def set_aside(self, samples: Sequence[Any], dataset: str) -> bool:
        """Do not read these samples of the dataset again; false if no loader of it is known."""
        for delivery in reversed(self._recent):
            if delivery.dataset == dataset and set(samples) <= set(delivery.indices or ()):
                known = self._known_aside(delivery.source)
                if known is None:
                    known = set()
                    self._aside.append((delivery.source, known))
                known.update(samples)
                return True
        return False

    def bad_samples(self) -> tuple[list[Any], str]:
        """Of the newest batch the samples whose rows are not finite, and their dataset's class.

        None where that cannot be told, or where it is true of every row. Reads the batch.
        """
        for delivery, tensors in self.recent()[-1:]:
            indices = delivery.indices or []
            values = [each for each in tensors if each.is_floating_point() and each.dim()]
            values = [each for each in values if len(each) == len(indices) and each.numel()]
            bad: set[int] = set()
            for tensor in values:
                rows = (~tensor.isfinite()).reshape(len(tensor), -1).any(1)
                bad.update(rows.nonzero().flatten().tolist())  # host sync
            if bad and (len(bad) < len(indices) or len(indices) == 1):
                return [indices[row] for row in sorted(bad)], delivery.dataset
        return [], ""

    def _known_aside(self, source: Source) -> set[Any] | None:
        """What was set aside of the dataset that the source reads, in this epoch or another."""
        dataset = source.dataset
        for each, known in self._aside:
            if each is source or (dataset is not None and each.dataset is dataset):
                return known
        return None

    def _without(self, iterator: Any, index: Any, original: Callable[..., Any]) -> Any:
        """What the dataset is asked for in the place of samples that were set aside.

        Another one of the same batch, so that batches stay as large as they are; where all of a
        batch were, the next batch.
        """
        source = _source(iterator)
        aside = self._known_aside(source)
        if not aside:
            return index
        sample = Delivery(0, None, source, []).sample
        while True:
            if not isinstance(index, (list, tuple)):
                is_good = index is None or sample(index) not in aside
                if is_good:
                    return index
            elif None in index:  # an iterable dataset
                return index
            else:
                good = [each for each in index if sample(each) not in aside]
                if len(good) == len(index):
                    return index
                if good:
                    rest = itertools.cycle(good)
                    return [each if sample(each) not in aside else next(rest) for each in index]
            index = original(iterator)

    def _around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def advance(iterator: Any) -> Any:
            if self.again is not None:
                return self.again()
            batch = original(iterator)
            try:
                self._note(iterator, batch)
            except Exception as error:
                self._safely.note(error)
            return batch

        return advance

    def _note(self, iterator: Any, batch: Any) -> None:
        source, number = _source(iterator), int(iterator._num_yielded) - 1
        received = getattr(iterator, "_rcvd_idx", None)  # only where there are workers
        task = number if received is None else int(received) - 1
        is_in_order = received is None or getattr(iterator, "_in_order", True)
        indices = source.asked.pop(task, None) if is_in_order else None
        delivery = Delivery(number, indices, source, _outer_tensors(batch))
        self._recent.append(delivery)
        if self._heard is not None:
            self._heard(delivery, batch)


class _Left:
    """Lives as long as an iterator does: a `for` lets go of it as it ends."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = weakref.ref(deliveries)

    def __del__(self) -> None:
        deliveries = self._deliveries()
        if deliveries is not None and deliveries.on_left is not None:
            with contextlib.suppress(ValueError):  # nobody called it: the process ends
                deliveries.on_left(sys._getframe(1))


def failed_delivery(error: BaseException) -> Delivery | None:
    """The batch in whose reading the error was raised, here or in a worker; None if in none."""
    for frame, _ in reversed(list(walk_tb(error.__traceback__))):
        iterator = frame.f_locals.get("self")
        if isinstance(iterator, _BaseDataLoaderIter):
            number = int(iterator._num_yielded)
            received = getattr(iterator, "_rcvd_idx", None)  # only where there are workers
            task = number if received is None else int(received) - 1
            source = _source(iterator)
            return Delivery(number, source.asked.get(task), source, [])
    return None


def _source(iterator: Any) -> Source:
    """Of an iterator that was there before we were, less is known."""
    source: Source | None = vars(iterator).get(_SOURCE)
    if source is None:
        source = vars(iterator)[_SOURCE] = Source(getattr(iterator, "_dataset", None))
    return source


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


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_CODE = (".py", ".pyc", ".pyi", ".so", ".pyd", ".dll", ".pth", ".toml")
_SYSTEM = ("/proc/", "/dev/", "/sys/", "/etc/", "/usr/lib/", "/usr/share/")
_LIBRARIES = tuple(
    {sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "purelib", "platlib")}
)
_listening: list[Reads] = []
_is_installed = False


class Read(NamedTuple):
    """A file that was opened; by which of the user's functions, and for which sample."""

    path: str
    code: CodeType | None
    sample: Any


class Reads:
    """The last files that were opened for reading while it listened."""

    def __init__(self) -> None:
        self._last: deque[Read] = deque(maxlen=64)
        self.count = 0

    def listen(self) -> None:
        """Hear of files from now on, until `stop`. The hook itself stays with the process."""
        global _is_installed
        if self not in _listening:
            _listening.append(self)
        if not _is_installed:
            _is_installed = True
            sys.addaudithook(_hook)

    def stop(self) -> None:
        if self in _listening:
            _listening.remove(self)

    def note(self, path: str) -> None:
        frame = sys._getframe(2)
        # Installed packages read files for others, or for themselves.
        places = (p for p in user_places(frame) if "-packages" not in p.code.co_filename)
        place = next(places, None)
        if place is None:
            return  # nobody's data: a library at its own work
        if not self._last or self._last[-1].path != path:
            self.count += 1
        self._last.append(Read(path, place.code, sample_under_way(frame)))

    def for_sample(self, sample: Any) -> list[str]:
        """The files that were opened last while this sample was read."""
        found: list[str] = []
        for read in reversed(self._last):
            if read.sample is not None and read.sample == sample:
                found.append(read.path)
            elif found:
                break
        return list(dict.fromkeys(reversed(found)))

    def by(self, code: CodeType | None) -> str | None:
        """The file that was opened last, if this function is who opened it."""
        last = self._last[-1] if self._last else None
        return last.path if last is not None and last.code is code else None

    def latest(self) -> str | None:
        return self._last[-1].path if self._last else None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or not _listening:
        return
    try:
        path, _, flags = args
        if flags & _WRITES or not isinstance(path, (str, bytes)):
            return
        full = os.path.abspath(os.fsdecode(path))
        if _is_data(full):
            for reads in _listening:
                reads.note(full)
    except Exception:
        return  # an error here would be raised out of the user's own open()


def _is_data(path: str) -> bool:
    if path.endswith(_CODE) or path.startswith((*_SYSTEM, *_LIBRARIES)) or path in sys.path:
        return False
    return f"{os.sep}__pycache__" not in path and f"{os.sep}stayfinite-" not in path
