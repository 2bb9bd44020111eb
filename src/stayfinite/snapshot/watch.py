"""Things that are looked at in every step.

Looking must cost far less than a census: an object is walked once, and again only when something
in it has become another object that is not a constant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.snapshot.cells import AttributesCell, Cell, DictCell, ListCell
from stayfinite.snapshot.census import Census
from stayfinite.snapshot.owners import add_attributes, add_buffers
from stayfinite.snapshot.plain import CONSTANTS, values_of

Contents = tuple[list[Cell], list[Any]]
"""Cells, and what was in each."""


def _is_box(cell: Cell) -> bool:
    """Whether what is in it may be walked into."""
    return isinstance(cell, (AttributesCell, DictCell, ListCell))


def _same(now: list[Any], last: list[Any]) -> bool:
    return len(now) == len(last) and all(map(is_, now, last))


def _has_new_things(now: list[Any], last: list[Any]) -> bool:
    """Whether more than constants differ."""
    if len(now) != len(last):
        return True
    changed = ((n, t) for n, t in zip(now, last, strict=True) if n is not t)
    return any(type(n) not in CONSTANTS or type(t) not in CONSTANTS for n, t in changed)


class Watch:
    """A census that is used until it is time to look again."""

    def __init__(self, look: Callable[[], Census]) -> None:
        self._look_around = look
        self._look()

    def _look(self) -> None:
        self._census = self._look_around()
        cells = self._census.cells
        self._boxes = [number for number, cell in enumerate(cells) if _is_box(cell)]
        self._last = self._values([cells[number].content() for number in self._boxes])

    @staticmethod
    def _values(contents: Iterable[Any]) -> list[Any]:
        return [*chain.from_iterable(map(values_of, contents))]

    @property
    def tensors(self) -> list[Tensor]:
        return [item.tensor for item in self._census.items]

    def census(self) -> Census:
        """What there is now."""
        cells = self._census.cells
        self._is_changed([cells[number].content() for number in self._boxes])
        return self._census

    def contents(self) -> tuple[Contents, bool]:
        """What is in the cells now, and whether they are others than last time."""
        cells = self._census.cells
        contents = [cell.content() for cell in cells]
        if not self._is_changed([contents[number] for number in self._boxes]):
            return (cells, contents), False
        return (self._census.cells, [cell.content() for cell in self._census.cells]), True

    def _is_changed(self, contents: list[Any]) -> bool:
        """Whether there were new things, so that it looked again."""
        now = self._values(contents)
        if _same(now, self._last):
            return False
        is_new = _has_new_things(now, self._last)
        self._last = now
        if is_new:
            self._look()
        return is_new


class SchedulerWatch(Watch):
    """A scheduler: most hold numbers and make new lists of numbers in each step."""

    def __init__(self, look: Callable[[], Census]) -> None:
        super().__init__(look)
        first, *others = [*self._census.cells, None]
        is_simple = all(isinstance(cell, ListCell) for cell in others[:-1])
        self._attributes = first if is_simple and isinstance(first, AttributesCell) else None

    def contents(self) -> tuple[Contents, bool]:
        return self._of_numbers() or super().contents()

    def _of_numbers(self) -> tuple[Contents, bool] | None:
        """The contents of a simple one, None of any other."""
        if self._attributes is None or self._census.items:
            return None
        attributes = self._attributes.content()
        cells: list[Cell] = [self._attributes]
        contents: list[Any] = [attributes]
        for value in attributes.values():
            if type(value) in CONSTANTS or isinstance(value, Optimizer):
                continue
            if type(value) is not list or not CONSTANTS.issuperset(map(type, value)):
                return None
            cells.append(ListCell(value, "scheduler", "scheduler"))
            contents.append(value.copy())
        return (cells, contents), False


class ModulesWatch:
    """What modules hold besides parameters; the ids of these are `owned`.

    There are many, so that the usual case, nothing new, is one comparison for all.
    """

    def __init__(self, modules: Iterable[nn.Module], owned: set[int]) -> None:
        self._owned = owned
        self._modules = [_Module(module, owned) for module in modules]
        self._arrange()

    def _arrange(self) -> None:
        self._dicts = [box for module in self._modules for box in module.dicts]
        self._lengths = list(map(len, self._dicts))
        views = [view for module in self._modules for view in module.views]
        self._reads = [(view.read, view.value) for view in views]
        self._inner = [cell for module in self._modules for cell in module.inner]
        self._boxes = [number for number, cell in enumerate(self._inner) if _is_box(cell)]
        self._cells: list[Cell] = [*views, *self._inner]
        self._last = self._values(self._contents())

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for module in self._modules for tensor in module.tensors]

    def contents(self) -> tuple[Contents, bool]:
        """What is in the cells now, and whether they are others than last time."""
        if list(map(len, self._dicts)) == self._lengths:
            with contextlib.suppress(KeyError):
                contents = self._contents()
                if _same(self._values(contents), self._last):
                    return (self._cells, contents), False
        is_new = self._look()
        return (self._cells, self._contents()), is_new

    def _contents(self) -> list[Any]:
        contents: list[Any] = [read(value) for read, value in self._reads]
        return contents + [cell.content() for cell in self._inner] if self._inner else contents

    def _values(self, contents: list[Any]) -> list[Any]:
        first = len(self._reads)
        boxes = [values_of(contents[first + number]) for number in self._boxes]
        return [*chain.from_iterable(contents[:first]), *chain.from_iterable(boxes)]

    def _look(self) -> bool:
        """Walk the modules that hold new things; whether there were any."""
        known = [module.is_known() for module in self._modules]
        self._modules = [
            module if is_known else _Module(module.module, self._owned)
            for module, is_known in zip(self._modules, known, strict=True)
        ]
        if all(known):
            self._last = self._values(self._contents())
        else:
            self._arrange()
        return not all(known)


class _Module:
    """One module: its buffers, its attributes, and what is in them."""

    def __init__(self, module: nn.Module, owned: set[int]) -> None:
        census = Census(owned)
        add_buffers(census, module, "", "buffers")
        add_attributes(census, module, "", "attributes")
        self.module, self.dicts = module, (vars(module), module._buffers)
        buffers, attributes, *self.inner = census.cells
        assert isinstance(buffers, DictCell)
        assert isinstance(attributes, AttributesCell)
        tensors = [item.tensor for item in census.items]
        self.tensors = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        keys = [key for key in attributes.value if key not in attributes.skipped]
        views = ((attributes, keys), (buffers, list(buffers.value)))
        self.views = [_View(cell, its) for cell, its in views if its]
        self._lengths, self._last = list(map(len, self.dicts)), self._values()

    def _values(self) -> list[Any]:
        read = [view.content() for view in self.views]
        boxes = [values_of(cell.content()) for cell in self.inner if _is_box(cell)]
        return [*chain.from_iterable(read), *chain.from_iterable(boxes)]

    def is_known(self) -> bool:
        """Whether it holds nothing new but constants."""
        try:
            now = self._values()
        except KeyError:
            return False
        if list(map(len, self.dicts)) != self._lengths or _has_new_things(now, self._last):
            return False
        self._last = now
        return True


class _View:
    """All keys of a cell that count, read at once."""

    def __init__(self, cell: DictCell | AttributesCell, keys: list[str]) -> None:
        self.name, self.part, self.value = cell.name, cell.part, cell.value
        self._cell, self._keys = cell, keys
        # Of one key alone it would not make a tuple.
        self.read: Callable[[Any], tuple[Any, ...]] = itemgetter(*keys, keys[0])

    def content(self) -> tuple[Any, ...]:
        return self.read(self.value)

    def put_back(self, content: tuple[Any, ...]) -> None:
        self._cell.put_back(dict(zip(self._keys, content, strict=False)))
