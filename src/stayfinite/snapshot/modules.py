"""What modules hold besides parameters, looked at in every step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from stayfinite.snapshot.cells import AttributesCell, Cell, DictCell
from stayfinite.snapshot.census import STRUCTURE, Census
from stayfinite.snapshot.form import Form, same
from stayfinite.snapshot.owners import add_attributes, add_buffers
from stayfinite.snapshot.plain import values_of
from stayfinite.snapshot.watch import Box, Contents


class Family:
    """Which modules have which children."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._dicts = [module._modules for module in modules]
        self._children = self._children_now()

    def _children_now(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(map(dict.values, self._dicts))]

    def is_whole(self) -> bool:
        """Whether nobody has come or gone."""
        return same(self._children_now(), self._children)


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
        self._boxes = [number for number, cell in enumerate(self._inner) if isinstance(cell, Box)]
        self._cells: list[Cell] = [*views, *self._inner]
        self._form = Form(self._values(*self._now()))

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for module in self._modules for tensor in module.tensors]

    def contents(self) -> tuple[Contents, bool]:
        """What is in the cells now, and whether they are others than last time."""
        if list(map(len, self._dicts)) == self._lengths:
            with contextlib.suppress(KeyError):
                views, inner = self._now()
                if self._form.fits(self._values(views, inner)):
                    return (self._cells, views + inner), False
        self._look()
        views, inner = self._now()
        return (self._cells, views + inner), True

    def _now(self) -> tuple[list[Any], list[Any]]:
        inner = [cell.content() for cell in self._inner] if self._inner else []
        return [read(value) for read, value in self._reads], inner

    def _values(self, views: list[Any], inner: list[Any]) -> list[Any]:
        values = [*chain.from_iterable(views)]
        for number in self._boxes:
            values += values_of(inner[number])
        return values

    def _look(self) -> None:
        """Walk the modules that hold new things."""
        self._modules = [
            module if module.is_known() else _Module(module.module, self._owned)
            for module in self._modules
        ]
        self._arrange()


class _Module:
    """One module: its children, its buffers, its attributes, and what is in them."""

    def __init__(self, module: nn.Module, owned: set[int]) -> None:
        census = Census(owned)
        add_buffers(census, module, "", "buffers")
        add_attributes(census, module, "", "attributes")
        self.module, self.dicts = module, (vars(module), module._buffers, module._modules)
        buffers, attributes, *self.inner = census.cells
        assert isinstance(buffers, DictCell)
        assert isinstance(attributes, AttributesCell)
        tensors = [item.tensor for item in census.items]
        self.tensors = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        keys = [key for key in attributes.value if key not in attributes.skipped]
        children = _ChildrenCell(module._modules, "", STRUCTURE)
        views = ((attributes, keys), (buffers, [*buffers.value]), (children, [*children.value]))
        self.views = [_View(cell, its) for cell, its in views if its]
        self._lengths, self._form = list(map(len, self.dicts)), Form(self._values())

    def _values(self) -> list[Any]:
        read = [view.content() for view in self.views]
        boxes = [values_of(cell.content()) for cell in self.inner if isinstance(cell, Box)]
        return [*chain.from_iterable(read), *chain.from_iterable(boxes)]

    def is_known(self) -> bool:
        """Whether it holds nothing new but constants."""
        if list(map(len, self.dicts)) != self._lengths:
            return False
        try:
            return self._form.fits(self._values())
        except KeyError:
            return False


class _ChildrenCell(DictCell):
    """Watched, but never put back."""

    def put_back(self, content: dict[str, nn.Module]) -> None:
        pass


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
