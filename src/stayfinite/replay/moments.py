"""What is kept of each step so that it can be run again: generators, buffers, carried values.

A moment is noted after every update and after every batch that a loader hands over. All of it is
by reference or a small copy on the same device; nothing waits for a device.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import enum
import functools
import inspect
import itertools
import random
import sys
import weakref
from collections import deque
from collections.abc import Container, Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.detect.memory import local
from stayfinite.distributed import world_size
from stayfinite.locate.source import USER, Place, kind_of, positions
from stayfinite.nested import named_tensors
from stayfinite.replay.loop import loops_around, variables_of
from stayfinite.snapshot.copies import CONSTANTS, Cell, FunctionsCell, is_generator_type, same
from stayfinite.snapshot.mark import KeptTensors, TensorWatch
from stayfinite.snapshot.rng import SeldomReadCell, generator_cell, numpy_cell
from stayfinite.training import params_of

Kind = Literal["entered", "delivered", "updated", "passed"]
_REMEMBERED = 64  # moments
_MOST_BYTES = 256 << 20  # of batches that are kept beyond the last two
_MOST_FRAMES = 64
# Whose loops are not training: test runners, notebooks, servers.
_HOSTS = frozenset(
    ["_pytest", "pluggy", "xdist", "execnet", "IPython", "ipykernel", "tornado", "nbclient"]
    + ["debugpy", "pydevd", "coverage", "ray", "uvicorn", "gunicorn", "celery", "click"]
)
ITERATORS = frozenset(map(type, (iter([]), iter(()), iter(range(0)), iter(range(1 << 99)))))
_MOST_SEARCHED = 50_000
_FEW = 1 << 22  # elements


class FrameSpot(NamedTuple):
    """Where a frame of the user's was; the frame is known by its number, so that it may end."""

    frame: int
    code: CodeType
    lasti: int

    @property
    def place(self) -> Place:
        return Place(self.code, self.lasti, line_at(self.code, self.lasti))


class Moment:
    """One moment of training: what has to be put back to go on from there once more."""

    __slots__ = (
        *("attributes", "batch", "buffers", "frames", "gradients", "kind"),
        *("names", "nbytes", "optimizer", "random", "rates", "weights"),
    )

    def __init__(
        self,
        kind: Kind,
        frames: list[tuple[int, CodeType, int]],  # what a FrameSpot has, innermost first
        names: list[tuple[int, dict[str, Any]]],
        random: list[tuple[Cell, Any]],
        buffers: KeptTensors | None,
    ) -> None:
        self.kind, self.frames, self.names = kind, frames, names
        self.random, self.buffers = random, buffers
        self.attributes: list[tuple[weakref.ref[Any], str, Any]] = []  # of the user's objects
        self.optimizer: int | None = None  # whose update it follows
        self.rates: list[Any] = []  # learning rates of that update
        self.gradients: list[Tensor | None] | None = None  # of that update, of a small model
        self.weights: list[tuple[Tensor, Tensor, Tensor | None]] = []  # and gradients, by hand
        self.batch: Any = None
        self.nbytes = 0

    @property
    def spots(self) -> tuple[FrameSpot, ...]:
        """Where the user's frames were, innermost first."""
        return tuple(itertools.starmap(FrameSpot, self.frames))

    def line_in(self, frame: FrameType) -> int | None:
        path = self.path_from(frame)
        return path[0][1] if path else None

    def path_from(self, frame: FrameType) -> list[tuple[CodeType, int]]:
        """The functions with their lines, from this frame inwards; [] if it was not there."""
        for place, (number, code, _) in enumerate(self.frames):
            if number == id(frame) and code is frame.f_code:
                return [(code, line_at(code, lasti)) for _, code, lasti in self.frames[place::-1]]
        return []

    def values_in(self, frame: FrameType) -> dict[str, Any]:
        """Names that the loops in this frame carry, with their values at this moment."""
        held = next((values for number, values in self.names if number == id(frame)), {})
        return {n: copy.copy(v) if type(v) in ITERATORS else v for n, v in held.items()}

    def restore(self, *, newer: Container[str] = ()) -> None:
        """Put generators, buffers and attributes back, but for those that are newer."""
        self.restore_random()
        if self.buffers is not None:
            self.buffers.restore()
        self.restore_attributes(newer=newer)

    @torch.no_grad()
    def restore_weights(self) -> None:
        """Put weights and gradients back that the script updates itself."""
        for leaf, value, gradient in self.weights:
            leaf.copy_(value)
            leaf.grad = gradient

    def restore_attributes(self, *, newer: Container[str] = ()) -> None:
        for ref, name, value in self.attributes:
            owner = ref()
            if owner is None or name in newer:
                continue
            if value is MISSING:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, value)

    def restore_random(self) -> None:
        for cell, state in self.random:
            cell.put_back(state)


class Moments:
    """The last moments of training in this process, newest last."""

    def __init__(self) -> None:
        self._kept: deque[Moment] = deque(maxlen=_REMEMBERED)
        self._generators = _Generators()
        self._buffers = _Buffers()
        self._attributes = _Attributes()
        self._noted = 0
        self._updates: dict[int, int] = {}  # by optimizer
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._sizes = (0, 0)
        self._passes, self._skips = 0, False  # backward passes since the last update
        self._weights: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.has_gradients: dict[int, bool] = {}
        """Of each optimizer: whether its parameters had gradients as the step's first backward
        pass began."""

    def __iter__(self) -> Iterator[Moment]:
        return iter(self._kept)

    @property
    def newest(self) -> Moment | None:
        return self._kept[-1] if self._kept else None

    @property
    def optimizers(self) -> set[int]:
        """Those that have made updates, by their ids."""
        return set(self._updates)

    def forget(self) -> None:
        """Let go of everything."""
        self._kept.clear()
        self._generators, self._buffers = _Generators(), _Buffers()
        self._attributes = _Attributes()
        self.has_gradients.clear()
        self._updates.clear()
        self._optimizers.clear()

    def watch_modules(self, modules: Iterable[nn.Module]) -> None:
        """Keep the buffers of these too."""
        for module in modules:
            self._buffers.add(module, is_given_one=False)

    def registered(self, module: nn.Module) -> None:
        """A module is given a buffer."""
        self._buffers.add(module, is_given_one=True)

    def updated(self, optimizer: Optimizer, frame: FrameType | None) -> None:
        """An update was attempted."""
        whose = id(optimizer)
        count = self._updates[whose] = self._updates.get(whose, 0) + 1
        if count == 1:
            self._optimizers[whose] = weakref.ref(optimizer)
        if len(self._updates) == 1 or count == min(self._updates.values()):
            self._forget_turns(whose)
        self._passes = 0
        if self._weights:
            self._weights.pop(whose, None)
        for earlier in self._kept:  # only those of the last update are asked for
            if earlier.optimizer == whose:
                earlier.gradients = None
        moment = self._note("updated", frame)
        moment.optimizer = whose
        moment.rates = [group.get("lr") for group in optimizer.param_groups]
        params = params_of(optimizer)
        if self._are_few(params):
            moment.gradients = [param.grad for param in params]
        self.has_gradients.clear()

    def of_update(self, optimizer: Optimizer, frame: FrameType | None) -> Moment:
        """The moment of an update that is under way; it is not kept."""
        frames = [(id(each), each.f_code, each.f_lasti) for each in user_frames(frame)]
        moment = Moment("updated", frames, [], [], None)
        moment.optimizer = id(optimizer)
        moment.rates = [group.get("lr") for group in optimizer.param_groups]
        moment.gradients = [param.grad for param in params_of(optimizer)]
        return moment

    def keep_weights(self, optimizer: Optimizer) -> None:
        """An update begins that may run the model on the way, with weights that it has moved."""
        params = params_of(optimizer)
        if self._are_few(params):
            own = [local(param).detach() for param in params]
            self._weights[id(optimizer)] = [(param, param.clone()) for param in own]

    @property
    def has_weights(self) -> bool:
        """Whether an update is under way whose beginning is known."""
        return bool(self._weights)

    @torch.no_grad()
    def restore_weights(self) -> None:
        """As they were when the update that is under way began."""
        for pairs in self._weights.values():
            for param, value in pairs:
                param.copy_(value)

    def _are_few(self, params: list[Tensor]) -> bool:
        """Whether keeping their gradients until the next update takes little memory."""
        if len(params) != self._sizes[0]:
            self._sizes = len(params), sum(map(Tensor.numel, params))
        return self._sizes[1] <= _FEW

    def _forget_turns(self, optimizer: int) -> None:
        """A turn of the loop has ended with this update: what was before the last one goes.

        Of several optimizers it is the one that steps most seldom which ends a turn.
        """
        kept = self._kept
        for number in range(len(kept) - 1, 0, -1):
            if kept[number].optimizer == optimizer:
                for _ in range(number):
                    kept.popleft()
                return

    @property
    def passes_since_update(self) -> int:
        """Backward passes since an optimizer made its last update."""
        return self._passes

    def counts_pass(self) -> bool:
        """A backward pass is over: is it noted? It is where not each is followed by an update."""
        self._passes += 1
        self._skips = self._skips or self._passes > 1
        return self._skips or not self._updates

    def passed(self, frame: FrameType | None, leaves: Iterable[Tensor]) -> None:
        """Note that a backward pass is over; `leaves` are trained, and by no optimizer so far."""
        moment = self._note("passed", frame)
        # With several ranks they may be shards, or whole ones whose memory comes and goes.
        is_by_hand = not self._updates and self._passes > 2 and world_size() == 1
        trained = list(leaves) if is_by_hand else []
        if trained and self._are_few(trained):
            moment.weights = [(leaf, leaf.detach().clone(), leaf.grad) for leaf in trained]

    def entered(self, frame: FrameType | None) -> None:
        """The first module is called, or the first since there is another optimizer."""
        self._noted = 0  # there may be other objects than before
        self._note("entered", frame)

    def delivered(self, batch: Any, frame: FrameType | None) -> None:
        """A loader hands over a batch."""
        moment = self._note("delivered", frame)
        moment.batch = batch
        moment.nbytes = sum(tensor.nbytes for _, tensor in named_tensors(batch, ""))
        self._let_go_of_batches()

    def before_backward(self) -> None:
        """A backward pass begins: if it is the first of a step, are there gradients from before?"""
        if self.has_gradients:
            return
        for ref in self._optimizers.values():
            if (optimizer := ref()) is not None:
                groups = optimizer.param_groups
                params = groups[0]["params"] if groups else []
                self.has_gradients[id(optimizer)] = bool(params) and params[0].grad is not None

    def _note(self, kind: Kind, frame: FrameType | None) -> Moment:
        self._noted += 1
        if not self._noted & (self._noted - 1):  # rarely, and more rarely as time goes on
            found = list(_things_in(user_frames(frame)))
            self._generators.add(thing for thing in found if is_generator_type(type(thing)))
            self._attributes.add(found)
        frames, names = _where(frame)
        # Between an update and a batch no training happens, so buffers stay.
        newest = self.newest if kind == "delivered" else None
        buffers = self._buffers.keep() if newest is None else newest.buffers
        moment = Moment(kind, frames, names, self._generators.read(), buffers)
        moment.attributes = self._attributes.read()
        self._kept.append(moment)
        return moment

    def _let_go_of_batches(self) -> None:
        """Batches may be large: of older ones only as many are kept as fit."""
        total = 0
        for age, moment in enumerate(m for m in reversed(self._kept) if m.kind == "delivered"):
            total += moment.nbytes
            if age > 1 and total > _MOST_BYTES:
                moment.batch, moment.nbytes = GONE, 0


GONE = object()
"""In the place of a batch that was let go."""
MISSING = object()
"""In the place of an attribute that was not there."""


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames that are neither torch's nor ours, innermost first, up to whoever runs programs."""
    count = 0
    while frame is not None and count < _MOST_FRAMES:
        role = _role_in(frame)
        if role == _HOST:
            return
        if role == USER:
            yield frame
        frame, count = frame.f_back, count + 1


_HOST = -1
_roles: dict[str, int] = {}  # of files


def _role_in(frame: FrameType) -> int:
    code = frame.f_code  # each reading of it is an audit event, for which there may be a hook
    role = _roles.get(code.co_filename)
    if role is None:
        is_host = str(frame.f_globals.get("__name__")).partition(".")[0] in _HOSTS
        role = _roles[code.co_filename] = _HOST if is_host else kind_of(code)
    return role


def line_at(code: CodeType, lasti: int) -> int:
    """The line of an instruction."""
    return positions(Place(code, lasti, code.co_firstlineno))[0]


_Names = tuple[frozenset[str], frozenset[str]]


class _Known(NamedTuple):
    """What is known of an instruction at which frames stand."""

    code: CodeType
    role: int
    names: _Names | None
    """Those that are noted of the loops around it, and of `for` with loops inside."""


# By the number of the code, which the value keeps alive: its own hash takes long.
_known: dict[tuple[int, int], _Known] = {}


def _learn(frame: FrameType) -> _Known:
    """A frame's line takes long to find, so it is looked for once."""
    code, lasti = frame.f_code, frame.f_lasti
    noted: frozenset[str] = frozenset()
    targets: frozenset[str] = frozenset()
    if (role := _role_in(frame)) == USER:
        loops = loops_around(code, line_at(code, lasti))
        noted = noted.union(*(loop.noted for loop in loops))
        targets = targets.union(*(loop.given for loop in loops if loop.has_loops))
    names = (noted, targets) if noted or targets else None
    known = _known[id(code), lasti] = _Known(code, role, names)
    return known


_Spots = list[tuple[int, CodeType, int]]
_Values = list[tuple[int, dict[str, Any]]]


def _where(frame: FrameType | None) -> tuple[_Spots, _Values]:
    """What `user_frames` gives, as spots, and what is noted of the variables in each.

    This is in every healthy step, so a frame takes one look-up.
    """
    spots: _Spots = []
    values: _Values = []
    count = 0
    while frame is not None and count < _MOST_FRAMES:
        code, lasti = frame.f_code, frame.f_lasti
        _, role, names = _known.get((id(code), lasti)) or _learn(frame)
        if role == USER:
            spots.append((id(frame), code, lasti))
            if names is not None:
                values.append((id(frame), _values_in(frame, *names)))
        elif role == _HOST:
            break
        frame, count = frame.f_back, count + 1
    return spots, values


_COUNTS = frozenset([int, str, float, bool])


def _values_in(frame: FrameType, noted: Iterable[str], targets: Iterable[str]) -> dict[str, Any]:
    # At module level they are in the module's own dict, which may be large.
    is_module = frame.f_code.co_name == "<module>"
    held = frame.f_globals if is_module else variables_of(frame)
    values = {}
    for name in targets:  # by which one turn is known from the next
        if type(value := held.get(name)) in _COUNTS:
            values[name] = value
    for name in noted:
        if name in held:
            value = held[name]
            values[name] = copy.copy(value) if type(value) in ITERATORS else _light(value)
    return values


def _light(value: Any) -> Any:
    """The value, without the graph that hangs on a tensor."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach()
    return value


class _Generators:
    """All random number generators, each read as often as it has to be."""

    def __init__(self) -> None:
        self._host: list[Cell] = []
        self._seldom: list[SeldomReadCell] = [
            SeldomReadCell(generator_cell(torch.default_generator, "torch")),
            SeldomReadCell(FunctionsCell("python", "random", random.getstate, random.setstate)),
        ]
        self._known: dict[int, Any] = {id(torch.default_generator): torch.default_generator}
        self._has_numpy = self._has_cuda = self._are_unused = False
        self._states: list[tuple[Cell, Any]] = []
        self._reads = 0

    def read(self) -> list[tuple[Cell, Any]]:
        """Their states; where steps use none, those of up to 32 reads before."""
        if not self._has_numpy and "numpy.random" in sys.modules:
            self._has_numpy, self._are_unused = True, False
            self._seldom.append(SeldomReadCell(numpy_cell()))
        if not self._has_cuda and torch.cuda.is_initialized():
            # Their states are a seed and an offset, which the host knows.
            self._has_cuda, self._are_unused = True, False
            for number, generator in enumerate(torch.cuda.default_generators):
                self._host.append(generator_cell(generator, f"cuda:{number}"))
        self._reads += 1
        if self._are_unused and self._reads % SeldomReadCell.EVERY:
            return self._states
        states = [(cell, cell.content()) for cell in self._host]
        for each in self._seldom:
            states.append((each.cell, each.read() if self._are_unused else each.content()[0]))
        self._are_unused = not self._host and all(each.is_unused for each in self._seldom)
        self._states = states
        return states

    def add(self, generators: Iterable[Any]) -> None:
        for found in generators:
            if id(found) not in self._known:
                self._known[id(found)] = found
                self._are_unused = False
                cell = generator_cell(found, "generator")
                if isinstance(found, torch.Generator):
                    self._host.append(cell)
                else:
                    self._seldom.append(SeldomReadCell(cell))


def _things_in(frames: Iterable[FrameType]) -> Iterator[Any]:
    """Generators and objects of the user's classes in variables, as far as a short search goes."""
    todo = deque(itertools.chain(*(variables_of(frame).values() for frame in frames)))
    seen: set[int] = set()
    for _ in range(_MOST_SEARCHED):
        if not todo:
            return
        value = todo.popleft()
        sort = _sorts.get(type(value)) or _sort_of(type(value))
        if sort is _Sort.CLOSED or id(value) in seen:
            continue
        seen.add(id(value))
        if sort is _Sort.SEQUENCE:
            todo.extend(value[:50])
        elif sort is _Sort.DICT:
            todo.extend(itertools.islice(value.values(), 50))
        else:
            if sort is not _Sort.OBJECT:
                yield value
            inside = getattr(value, "__dict__", None)
            if type(inside) is dict and sort is not _Sort.GENERATOR:
                todo.extend(v for name, v in inside.items() if not name.endswith("_hooks"))


class _Sort(enum.Enum):
    """What a search does with the values of a type."""

    CLOSED = enum.auto()
    """Nothing is looked for in it: a constant, a tensor, a function."""
    SEQUENCE = enum.auto()
    DICT = enum.auto()
    GENERATOR = enum.auto()
    OBJECT = enum.auto()
    USERS = enum.auto()
    """An object of the user's own class."""


# A search meets thousands of values of a few types, so the answer for a type is kept.
_sorts: dict[type, _Sort] = {}


def _sort_of(kind: type) -> _Sort:
    if is_generator_type(kind):
        sort = _Sort.GENERATOR
    elif kind in (list, tuple):
        sort = _Sort.SEQUENCE
    elif kind is dict:
        sort = _Sort.DICT
    elif kind in CONSTANTS or issubclass(kind, (Tensor, type)) or kind.__module__ == "builtins":
        sort = _Sort.CLOSED
    else:
        sort = _Sort.USERS if is_users_class(kind) else _Sort.OBJECT
    _sorts[kind] = sort
    return sort


def is_users_class(kind: type) -> bool:
    """Whether a class is the user's own, or of a library that is not torch's or python's."""
    return _is_users_module(kind.__module__)


@functools.cache
def _is_users_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return name == "__main__" if file is None else kind_of(compile("", file, "exec")) == USER


class _Attributes:
    """Attributes of the user's objects that their methods assign: hidden states, counters, caches.

    They are kept by reference.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[weakref.ref[Any], tuple[str, ...]]] = {}

    def add(self, things: Iterable[Any]) -> None:
        for thing in things:
            names = assigned_attributes(type(thing))
            if names and id(thing) not in self._owners:
                with contextlib.suppress(TypeError):  # not all classes allow weak references
                    self._owners[id(thing)] = weakref.ref(thing), names

    def read(self) -> list[tuple[weakref.ref[Any], str, Any]]:
        found = []
        for ref, names in self._owners.values():
            if (held := getattr(ref(), "__dict__", None)) is not None:
                found += [(ref, n, _light(held.get(n, MISSING))) for n in names]
        return found


_MAKERS = frozenset(["__init__", "__new__", "__post_init__", "__setstate__"])
_STORE = dis.opmap["STORE_ATTR"]


_assigned: dict[type, tuple[str, ...]] = {}


def assigned_attributes(kind: type) -> tuple[str, ...]:
    """The names of the attributes that the methods of a user's class assign after it was made."""
    if kind not in _assigned:
        users = [base for base in kind.__mro__ if is_users_class(base)]
        methods = [pair for base in users for pair in vars(base).items() if pair[0] not in _MAKERS]
        names: set[str] = set()
        for _, value in methods:
            function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
            if isinstance(function, FunctionType):
                names |= _stored(function.__code__)
        computed = {name for base in users for name in vars(base)}  # properties
        _assigned[kind] = tuple(sorted(names - computed))
    return _assigned[kind]


def _stored(code: CodeType) -> set[str]:
    found = {i.argval for i in dis.get_instructions(code) if i.opcode == _STORE}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _stored(constant)
    return found


class _Buffers:
    """The buffers of all modules that were given some."""

    def __init__(self) -> None:
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._watch = TensorWatch([])

    def add(self, module: nn.Module, *, is_given_one: bool) -> None:
        if is_given_one or module._buffers:
            self._modules[id(module)] = weakref.ref(module)

    def keep(self) -> KeptTensors | None:
        # _buffers: named_buffers() takes many times as long, and this runs in healthy steps.
        if not self._modules:
            return None
        alive = [module for ref in self._modules.values() if (module := ref()) is not None]
        held = [t for m in alive for t in m._buffers.values() if t is not None]
        if not same(held, self._watch.tensors):
            self._watch = TensorWatch(held, self._watch)
        return self._watch.keep()
