"""Things that are looked at in every step.

Looking must cost far less than a census: an object is walked once, and again only when something
in it has become another object that is not a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor

from stayfinite.snapshot.cells import AttributesCell, Cell, DictCell, ListCell, NotesCell
from stayfinite.snapshot.census import STRUCTURE, Census
from stayfinite.snapshot.form import Form, is_note, picker
from stayfinite.snapshot.plain import values_of

Contents = tuple[list[Cell], list[Any]]
"""Cells, and what was in each."""
Box = DictCell | AttributesCell | ListCell
"""A cell that may hold things to be walked into."""


def reader(cell: Cell) -> Callable[[], Any]:
    """Gives the content of the cell, the quickest way."""
    if isinstance(cell, Box) and type(cell.value) in (dict, list):
        copy: Callable[[], Any] = cell.value.copy
        return copy
    return cell.content


class Watch:
    """A census that is used until it is time to look again.

    Lists and dicts of constants in other boxes are notes: many schedulers write new ones in each
    step, and that needs no new look.
    """

    def __init__(self, look: Callable[[], Census]) -> None:
        self._look_around = look
        self._look()

    def _look(self) -> None:
        self.census = self._look_around()
        """What there was when it last looked."""
        cells = self.census.cells
        boxes = [cell for cell in cells if isinstance(cell, Box) and cell.part != STRUCTURE]
        held = {id(value) for box in boxes for value in values_of(box.value)}
        notes = {id(b.value): b for b in boxes if id(b.value) in held and is_note(b.value)}
        # Dicts before lists, so that the values of all are found in two goes.
        fixed = [box for box in boxes if id(box.value) not in notes]
        self._boxes = sorted(fixed, key=lambda box: isinstance(box, ListCell))
        self._lists_from = sum(not isinstance(box, ListCell) for box in fixed)
        structure = [cell for cell in cells if isinstance(cell, Box) and cell.part == STRUCTURE]
        self._structure = [cell.value.values() for cell in structure]
        self._others = [cell for cell in cells if not isinstance(cell, Box)]
        self._reads = [*map(reader, self._boxes)]
        self._arrange(notes)

    def _arrange(self, notes: dict[int, Box]) -> None:
        values = self._values([read() for read in self._reads])
        places: dict[str, list[int]] = {}
        for place, value in enumerate(values):
            if id(value) in notes:
                places.setdefault(notes[id(value)].part, []).append(place)
        loose = [*chain.from_iterable(places.values())]
        self._form, self._pick_notes = Form(values, loose=loose), picker(loose)
        self._note_counts = [*map(len, places.values())]
        self._cells: list[Cell] = [*self._boxes, *map(NotesCell, places), *self._others]

    def _values(self, contents: list[Any]) -> list[Any]:
        number = self._lists_from
        values = [*chain.from_iterable(map(dict.values, contents[:number]))]
        for content in contents[number:]:
            values += content
        return values + [*chain.from_iterable(self._structure)] if self._structure else values

    @property
    def tensors(self) -> list[Tensor]:
        return [item.tensor for item in self.census.items]

    def pairs(self, parts: Iterable[str]) -> list[tuple[Cell, Any]]:
        """The cells that belong to these parts, and what is in each now."""
        contents, _ = self._boxes_now()
        wanted = frozenset(parts)
        pairs = [*zip(self._cells, contents, strict=False)]
        pairs += [(cell, cell.content()) for cell in self._others if cell.part in wanted]
        return [pair for pair in pairs if pair[0].part in wanted]

    def contents(self) -> tuple[Contents, bool]:
        """What is in the cells now, and whether they are others than last time."""
        contents, is_new = self._boxes_now()
        if self._others:
            contents += [cell.content() for cell in self._others]
        return (self._cells, contents), is_new

    def _boxes_now(self) -> tuple[list[Any], bool]:
        """What is in boxes and notes, and whether there was something new, so that it looked."""
        contents = [read() for read in self._reads]
        values = self._values(contents)
        is_new = not (self._form.fits(values) and all(map(is_note, self._pick_notes(values))))
        if is_new:
            self._look()
            contents = [read() for read in self._reads]
            values = self._values(contents)
        notes = [(note, note.copy()) for note in self._pick_notes(values)]
        for count in self._note_counts:
            contents.append(notes[:count])
            notes = notes[count:]
        return contents, is_new
