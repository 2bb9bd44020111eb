"""The beginning of a step, noted cheaply enough to be noted every time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from stayfinite.detect.memory import undisturbed
from stayfinite.snapshot.copies import (
    CONSTANTS,
    AttributesCell,
    Cell,
    DictCell,
    FrozenCell,
    ListCell,
    Memories,
    NotesCell,
    ProtocolCell,
    Rooms,
    copy_all,
    is_constant,
    like,
    memories,
    put_back,
    size_of,
    values_of,
)
from stayfinite.snapshot.rng import device_cells, host_cells
from stayfinite.snapshot.walk import (
    STRUCTURE,
    Census,
    Members,
    add_attributes,
    add_buffers,
    add_object,
    add_param_groups,
    named_modules,
)
from stayfinite.training import params_of


class Mark:
    """Everything but parameters, optimizer state and averages, as a step began."""

    __slots__ = ("_contents", "_gradients", "_tensors")

    def __init__(
        self,
        contents: list[Contents],
        tensors: list[KeptTensors | None],
        gradients: KeptGradients,
    ) -> None:
        self._contents, self._tensors, self._gradients = contents, tensors, gradients

    def restore(self) -> None:
        pairs = [pair for cells, its in self._contents for pair in zip(cells, its, strict=True)]
        # What an object loads itself may replace tensors, so it comes first.
        for cell, content in sorted(pairs, key=lambda pair: not isinstance(pair[0], ProtocolCell)):
            cell.put_back(content)
        for tensors in self._tensors:
            if tensors is not None:
                tensors.restore()
        self._gradients.restore()


class Marker:
    """Makes marks of one training job."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._look()

    def _look(self) -> None:
        """Find everyone anew: at first, and when modules or parameters came or went."""
        modules = [module for _, module in named_modules(self._members.models)]
        self._rated = self._rated_now()
        held: list[Tensor] = [p for m in modules for p in m._parameters.values() if p is not None]
        params = list({id(param): param for param in [*held, *self._rated]}.values())
        self._family = Family(modules)
        self._modules = _Watched(ModulesWatch(modules, {id(param) for param in params}))
        self._followers = _Watched(Watch(self._follower_census))
        self._gradients = GradientWatch(params)
        self._cells: list[Cell] = [FrozenCell(params, "requires_grad", "attributes")]
        self._cells += self._generators()
        self._reads = [cell.content for cell in self._cells]

    def _rated_now(self) -> list[Tensor]:
        """The parameters that have learning rates."""
        return [param for optimizer in self._members.optimizers for param in params_of(optimizer)]

    def _follower_census(self) -> Census:
        """Param groups, schedulers and scaler."""
        census = Census()
        for optimizer in self._members.optimizers:
            add_param_groups(census, optimizer)
        for owner in self._members.schedulers:
            add_object(census, owner, "scheduler", "scheduler")
        if self._members.scaler is not None:
            add_object(census, self._members.scaler, "scaler", "scaler")
        return census

    def _generators(self) -> list[Cell]:
        census = Census()
        census.cells += [*host_cells(), *device_cells()]
        for generator in self._members.generators:
            census.value(generator, "random.generator", "random")
        self._is_cuda_awake = torch.cuda.is_initialized()
        return census.cells

    def mark(self) -> Mark:
        modules, followers = self._modules.keep(), self._followers.keep()
        if self._has_news() and not self._knows_all():
            self._look()
            modules, followers = self._modules.keep(), self._followers.keep()
        others = self._cells, [read() for read in self._reads]
        contents, tensors = [modules[0], followers[0], others], [modules[1], followers[1]]
        return Mark(contents, tensors, self._gradients.keep())

    def _has_news(self) -> bool:
        is_same_device = torch.cuda.is_initialized() is self._is_cuda_awake
        return self._modules.is_new or self._followers.is_new or not is_same_device

    def _knows_all(self) -> bool:
        """Whether devices, modules and parameters are those it found."""
        is_same_device = torch.cuda.is_initialized() is self._is_cuda_awake
        is_known = is_same_device and self._family.is_whole()
        return is_known and same(self._rated_now(), self._rated)


class _Watched:
    """A watch, and the tensors that it knows."""

    def __init__(self, watch: Watch | ModulesWatch) -> None:
        self._watch = watch
        self._tensors = TensorWatch(watch.tensors)
        self.is_new = False
        """Whether there was something new when it last looked."""

    def keep(self) -> tuple[Contents, KeptTensors | None]:
        contents, self.is_new = self._watch.contents()
        if self.is_new:
            self._tensors = TensorWatch(self._watch.tensors, self._tensors)
        return contents, self._tensors.keep()


# Things that are looked at in every step.
#
# Looking must cost far less than a census: an object is walked once, and again only when something
# in it has become another object that is not a constant.

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


Pick = Callable[[Sequence[Any]], tuple[Any, ...]]


class Form:
    """What is known of values: the type of each, and which things those are that can change.

    Constants may become others. Those at the places in `loose` are left to the caller.
    """

    def __init__(self, values: list[Any], *, loose: Iterable[int] = ()) -> None:
        self._types = [*map(type, values)]
        free = set(loose)
        odd = [place for place, its in enumerate(self._types) if its not in CONSTANTS]
        self._pick = picker([place for place in odd if place not in free])
        self._things = self._pick(values)

    def fits(self, values: list[Any]) -> bool:
        """Whether there is nothing new but constants and tuples of constants."""
        types = [*map(type, values)]
        if types != self._types:
            if len(types) != len(self._types) or not self._differ_in_constants(types):
                return False
            self._types = types
        things = self._pick(values)
        if all(map(is_, things, self._things)):
            return True
        pairs = zip(things, self._things, strict=True)
        is_like = all(n is o or (is_constant(n) and is_constant(o)) for n, o in pairs)
        self._things = things if is_like else self._things
        return is_like

    def _differ_in_constants(self, types: list[type]) -> bool:
        pairs = zip(types, self._types, strict=True)
        return CONSTANTS.issuperset(its for pair in pairs if pair[0] is not pair[1] for its in pair)


def same(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Whether they hold the same objects."""
    return len(one) == len(two) and all(map(is_, one, two))


def picker(places: Sequence[int]) -> Pick:
    """Gives what is at these places, as a tuple."""
    if not places:
        return lambda values: ()
    if len(places) == 1:
        place = places[0]
        return lambda values: (values[place],)
    return itemgetter(*places)


def is_note(value: Any) -> bool:
    """Whether it is a list or dict of nothing but constants."""
    if type(value) is list:
        return CONSTANTS.issuperset(map(type, value))
    return type(value) is dict and CONSTANTS.issuperset(map(type, value.values()))


SMALL = 1 << 16
"""Tensors of up to so many bytes are copied in each step without asking."""
_LEARNING = 3
_LOOK_AGAIN = 64


class TensorWatch:
    """Copies small tensors in each step, and large ones only when they have changed."""

    def __init__(self, tensors: Iterable[Tensor], before: TensorWatch | None = None) -> None:
        unique = {id(tensor): tensor for tensor in tensors}.values()
        values = [tensor for tensor in unique if memories(tensor)]
        known = {id(large.tensor): large for large in before._large} if before else {}
        self._small = [tensor for tensor in values if size_of(tensor) <= SMALL]
        self._large: list[_LargeTensor] = [
            known.get(id(tensor)) or _LargeTensor(tensor, is_late=before is not None)
            for tensor in values
            if size_of(tensor) > SMALL
        ]
        self._pool: list[Rooms] = []

    def keep(self) -> KeptTensors | None:
        """Their values now; None when there is nothing to keep."""
        return self._keep() if self._small or self._large else None

    @undisturbed
    def _keep(self) -> KeptTensors:
        rooms = self._pool.pop() if self._pool else Rooms(self._small)
        rooms.fill()
        return KeptTensors(rooms, self._pool, [large.keep() for large in self._large])


class KeptTensors:
    """Values of tensors at one moment; the memory goes back to its pool in the end."""

    def __init__(self, rooms: Rooms, pool: list[Rooms], large: list[_KeptLarge]) -> None:
        self._rooms, self._pool, self._large = rooms, pool, large

    def __del__(self) -> None:
        self._pool.append(self._rooms)

    def restore(self) -> None:
        self._rooms.empty()
        changed = [(t, kept) for t, kept, version in self._large if kept and version != t._version]
        put_back([tensor for tensor, _ in changed], [kept for _, kept in changed])


_KeptLarge = tuple[Tensor, Memories, int]
"""A tensor, its value, and the version that needs no restoring."""
_ALWAYS = -1


class _LargeTensor:
    """A tensor that is worth a look before it is copied: most large buffers never change.

    torch counts writes to a tensor, but not those through `.data` or by batch norm. So the first
    steps, and then some, compare bytes: who was caught once is copied each time. One that is
    new since the last step has replaced another, and will be replaced rather than written to:
    it is copied only if it is still there a step later.
    """

    def __init__(self, tensor: Tensor, *, is_late: bool) -> None:
        self.tensor = tensor
        self._is_late = is_late
        self._kept: Memories = []
        self._version = -1
        self._looks = 0
        self._writes_silently = False

    def keep(self) -> _KeptLarge:
        version = self.tensor._version
        if self._is_late:
            self._is_late = False
            return self.tensor, [], version
        self._looks += 1
        if version == self._version and not self._writes_silently:
            if self._looks > _LEARNING and self._looks % _LOOK_AGAIN:
                return self.tensor, self._kept, version
            if self._is_same():
                return self.tensor, self._kept, _ALWAYS
            self._writes_silently = True
        # Older marks may hold the old value.
        now = memories(self.tensor)
        self._kept = [like(memory) for memory in now]
        copy_all(zip(self._kept, now, strict=True))
        self._version = version
        return self.tensor, self._kept, _ALWAYS

    def _is_same(self) -> bool:
        return all(map(_same_bytes, memories(self.tensor), self._kept))  # host sync


def _same_bytes(one: Tensor, two: Tensor) -> bool:
    if one.is_contiguous() and two.is_contiguous():
        one, two = one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8)
    return torch.equal(one, two)


_Held = list[tuple[Tensor, Tensor, int]]
"""Parameters with the gradient they had, and its version."""


class GradientWatch:
    """Keeps leftover gradients by reference, and copies them only if steps write into them.

    Most loops drop them (`zero_grad()`), so that the reference is all that is needed; loops that
    accumulate into them or zero them in place are noticed in the first steps, which copy.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._looks = 0
        self._are_written = False
        self._last: _Held = []
        self._none = KeptGradients(params, [None] * len(params))

    def keep(self) -> KeptGradients:
        gradients = [param.grad for param in self._params]
        if self._last:
            self._learn()
        if all(map(is_, gradients, repeat(None))):
            return self._none
        return self._kept(gradients)

    def _learn(self) -> None:
        written = (p.grad is grad and grad._version != v for p, grad, v in self._last)
        self._are_written |= any(written)
        self._last = []

    def _kept(self, gradients: list[Tensor | None]) -> KeptGradients:
        self._looks += 1
        is_learning = self._looks <= _LEARNING
        if is_learning:
            pairs = zip(self._params, gradients, strict=True)
            self._last = [(p, grad, grad._version) for p, grad in pairs if grad is not None]
            self._are_written |= _share_memory(gradients)
        kept = KeptGradients(self._params, gradients)
        if is_learning or self._are_written:
            kept.copy()
        return kept


def _share_memory(gradients: Sequence[Tensor | None]) -> bool:
    """Whether they are parts of a larger memory, which others may write to (DDP's buckets)."""
    return any(
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.untyped_storage().nbytes() > gradient.nbytes
        for gradient in gradients
    )


class KeptGradients:
    """The gradients of one moment."""

    def __init__(self, params: Sequence[Tensor], gradients: list[Tensor | None]) -> None:
        self._params, self._gradients = params, gradients
        self._values: list[tuple[Tensor, list[Tensor]]] = []

    @torch.no_grad()
    def copy(self) -> None:
        for gradient in self._gradients:
            if gradient is not None:
                now = memories(gradient)
                self._values.append((gradient, [like(memory) for memory in now]))
                copy_all(zip(self._values[-1][1], now, strict=True))

    def restore(self) -> None:
        for param, gradient in zip(self._params, self._gradients, strict=True):
            if param.grad is not gradient:
                param.grad = gradient
        put_back([gradient for gradient, _ in self._values], [kept for _, kept in self._values])
