"""A block that leaves everything as it was: memory, objects, output and files.

What runs in it is the user's own code, a second time; nobody must notice.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import gc
import io
import logging
import math
import os
import queue
import shutil
import socket
import sys
import threading
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode

from stayfinite.detect.finite import largest
from stayfinite.detect.memory import is_sharded_type, local
from stayfinite.living import CSV_WRITER, FILES, living
from stayfinite.locate.source import USER, Place, kind_of, user_places
from stayfinite.replay.loop import is_forwarding, variables_of
from stayfinite.replay.moments import is_users_class
from stayfinite.snapshot.copies import ArrayCell, BoxCell, Cell, Contents, put_contents_back, same
from stayfinite.snapshot.rng import global_cells
from stayfinite.snapshot.walk import Census, add_object, add_optimizer
from stayfinite.training import params_of

_MOST_OBJECTS = 50_000
_LARGE = 64 << 20  # bytes of an array
_LONG = 10_000  # elements of a list whose insides are not walked
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
# What no replay may do; it is given up at the first of these.
_EFFECTS = frozenset(
    ["os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"]
    + ["os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr", "sqlite3.connect"]
    + ["socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind", "subprocess.Popen"]
    + ["os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.kill", "os.killpg"]
    + ["builtins.input", "shutil.rmtree", "shutil.move", "shutil.copyfile", "pty.spawn"]
)


class ReplayEnded(BaseException):
    """Ends a replay from inside; `reason` is why it was given up, None if it came to its end."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason


@contextlib.contextmanager
def protected(
    frames: Iterable[FrameType],
    *,
    taken: Mapping[int, Any] | None = None,
    is_last: bool = False,
    is_apart: bool = False,
    sums: list[HalfSum] | None = None,
) -> Iterator[None]:
    """Run the block and put everything back; `frames` are those whose variables it may change.

    ReplayEnded leaves the block where it would change a file or talk to anybody else, and, unless
    it `is_last`, so that nothing follows, where it would move a generator on; those in `taken`, by
    their numbers, give what they gave before, once. If it `is_apart`, this rank runs it without
    the others: what they would add up stays as it is here. Of what they would add up in float16,
    `sums` gets a note each.
    """
    kept = _Kept(list(frames))
    try:
        with contextlib.ExitStack() as all_of_them:
            all_of_them.enter_context(_silence())
            all_of_them.enter_context(_no_effects(taken=dict(taken or {}), is_last=is_last))
            if is_apart:
                all_of_them.enter_context(_apart_from_ranks(sums))
            all_of_them.enter_context(UndoLog(is_apart=is_apart))
            yield
    finally:
        kept.put_back()


# The interpreter's own way to raise in another thread, at its next instruction.
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
_start = threading.Thread.start  # no thread may be started in a protected block


def call_within(seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`; ReplayStopped if it takes longer or too much memory, wherever it is then.

    Nothing else is interrupted, so what has to be put back is put back after it.
    """
    ident, lock, is_over = threading.get_ident(), threading.Lock(), threading.Event()
    until, most = time.monotonic() + seconds, memory_limit()
    was_stopped = False

    def watch() -> None:
        nonlocal was_stopped
        why: type[ReplayStopped] | None = None
        while why is None and not is_over.wait(max(0.0, min(_LOOK, until - time.monotonic()))):
            if time.monotonic() >= until:
                why = ReplayTooLong
            elif resident_bytes() > most:
                why = ReplayTooLarge
        with lock:
            if why is not None and not is_over.is_set():
                was_stopped = True
                _raise_in(ident, ctypes.py_object(why))

    watcher = threading.Thread(target=watch, name="stayfinite deadline", daemon=True)
    _start(watcher)
    try:
        return function(*args)
    finally:
        with lock:
            is_over.set()
        if was_stopped:
            _let_it_come()


_LOOK = 0.05  # seconds between two looks at the memory
_LEAST_ROOM = 1 << 30


def memory_limit() -> float:
    """Resident bytes that a replay may come to: three times what the steps so far took at most.

    That is the highest that this process has had, above what it has now. A device has its own end:
    torch raises there, which ends a replay too.
    """
    now, highest = resident_bytes(), 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/self/status").read_text().splitlines()
        highest = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return now + max(3 * (highest - now), _LEAST_ROOM) if now else math.inf


def resident_bytes() -> int:
    """Of the memory of this process, what is in use; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _let_it_come() -> None:
    """Have an error that is on its way come here.

    To take it back (with no error in its place) leaves the interpreter a sign that something is
    on its way; where a profiler or debugger is at work, Python 3.11 waits for that for ever.
    """
    with contextlib.suppress(ReplayStopped):
        for _ in range(1000):
            pass


class ReplayStopped(ReplayEnded):
    """Ends a replay from outside."""

    said = "it was stopped"

    def __init__(self) -> None:
        super().__init__(self.said)


class ReplayTooLong(ReplayStopped):
    """Ends a replay that takes longer than it may."""

    said = "it took too long"


class ReplayTooLarge(ReplayStopped):
    """Ends a replay that takes more memory than it may."""

    said = "it took too much memory"


class UndoLog(TorchDispatchMode):
    """Copies tensors that were there before just as an operation is about to write to them."""

    def __init__(self, *, is_apart: bool = False) -> None:
        super().__init__()
        self._is_apart = is_apart
        self._new: set[int | None] = set()
        self._saved: dict[tuple[Any, ...], _KeptValue] = {}
        self._is_ours = False

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        for kept in reversed(self._saved.values()):  # later ones may overlap
            kept.put_back()
        self._saved.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled meanwhile, and the wrapper is not cheap

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if types and any(map(is_sharded_type, types)):
            return NotImplemented  # a DTensor's: it comes again as what it does to the shards
        if self._is_ours:
            return func(*args, **kwargs)
        if self._is_apart and func.namespace in _COLLECTIVES:
            raise ReplayEnded("it talks to the other ranks")
        if func._schema.is_mutable:
            self._is_ours = True
            try:
                self._save_written(func, args, kwargs)
            finally:
                self._is_ours = False
        out = func(*args, **kwargs)
        self._note_new(out, args)
        return out

    def _note_new(self, out: Any, args: tuple[Any, ...]) -> None:
        """Memory that the operation made: whatever is in none of its inputs."""
        given = {_memory(each) for each in _flat(args) if isinstance(each, Tensor)}
        for tensor in _flat((out,)):
            if isinstance(tensor, Tensor) and (memory := _memory(tensor)) not in given:
                self._new.add(memory)

    def _save_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for number, argument in enumerate(func._schema.arguments):
            info = argument.alias_info
            if info is None or not info.is_write:
                continue
            given = kwargs.get(argument.name, args[number] if number < len(args) else None)
            for tensor in _flat((given,)):
                if isinstance(tensor, Tensor):
                    self._save(tensor)

    def _save(self, tensor: Tensor) -> None:
        memory = _memory(tensor)
        if memory is None or memory in self._new or _is_freed(tensor):
            return
        key = (memory, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
        if key not in self._saved:
            self._saved[key] = _KeptValue(tensor)


class _KeptValue:
    """A tensor's value, put back so that a graph which has kept the tensor does not notice."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = local(tensor)
        self._tensor, self._value = tensor, tensor.detach().clone()
        self._version = None if tensor.is_inference() else tensor._version

    def put_back(self) -> None:
        if _is_freed(self._tensor):
            return
        # Writing through .data does not count; what was written before has been counted.
        self._tensor.data.copy_(self._value)
        if self._version is not None:
            torch._C._autograd._unsafe_set_version_counter((self._tensor,), (self._version,))


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


@dataclass(frozen=True)
class HalfSum:
    """A sum over the ranks in float16, which one rank did not take part in."""

    place: Place | None
    size: float  # the largest magnitude of this rank's part


@contextlib.contextmanager
def _apart_from_ranks(sums: list[HalfSum] | None) -> Iterator[None]:
    """Let sums and barriers over all ranks do nothing, and DDP leave gradients and buffers alone.

    No other rank is there to take part: it would be waited for in vain.
    """
    flags = ("require_backward_grad_sync", "require_forward_param_sync")
    with contextlib.ExitStack() as all_of_them:
        for name in ("all_reduce", "reduce", "barrier"):
            all_of_them.callback(setattr, dist, name, getattr(dist, name))
            is_sum = name != "barrier"
            setattr(dist, name, functools.partial(_note_sum, sums) if is_sum else _do_nothing)
        for module in living(DistributedDataParallel):
            for flag in flags:
                all_of_them.callback(setattr, module, flag, getattr(module, flag))
                setattr(module, flag, False)
        yield


def _note_sum(
    sums: list[HalfSum] | None,
    tensor: Tensor,
    *args: Any,
    op: Any = dist.ReduceOp.SUM,
    **kwargs: Any,
) -> None:
    if (
        sums is not None
        and tensor.dtype == torch.float16
        and tensor.numel()
        and op == dist.ReduceOp.SUM
    ):
        place = next(iter(user_places(sys._getframe(1), limit=1)), None)
        sums.append(HalfSum(place, largest(tensor)))


def _is_freed(tensor: Tensor) -> bool:
    """Whether FSDP has given its memory back: nothing may be read or written there."""
    try:
        return bool(tensor.numel()) and not tensor.untyped_storage().size()
    except (NotImplementedError, RuntimeError):
        return False


def _memory(tensor: Tensor) -> int | None:
    """Which memory it is in; None for what has none of its own."""
    try:
        # The storage's own address: one of a freed storage never belongs to an older one.
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or of a wrapper
        return None


class _Kept:
    """The state of the process that a replay may change: objects, gradients, generators."""

    def __init__(self, frames: list[FrameType]) -> None:
        optimizers = living(Optimizer)
        modules = living(nn.Module)
        params = {id(p): p for each in optimizers for p in params_of(each)}
        params |= {id(p): p for m in modules for p in m._parameters.values() if p is not None}
        self._gradients = [(p, p.grad, p.requires_grad) for p in params.values()]
        buffers = {id(b): b for m in modules for b in m._buffers.values() if b is not None}
        self._buffers = [_KeptValue(b) for b in buffers.values() if _can_copy(b)]
        census = Census({*params, *buffers})
        for optimizer in optimizers:
            add_optimizer(census, optimizer, {})
        for owner in (*living(LRScheduler), *living(GradScaler)):
            add_object(census, owner, "", "")
        census.cells += global_cells()
        walker = _Objects(census)
        for module in modules:
            census.attributes(module, "", "", skipped=_MACHINERY, enter=walker.enter)
        for frame in frames:
            for name, value in variables_of(frame).items():
                if not name.startswith("__"):  # __builtins__ and the like
                    walker.walk(value)
        self._globals = [(space, dict(space)) for space in _spaces(frames)]
        cells = [cell for cell in census.cells if not _is_table(cell)]
        self._contents: Contents = [(cell, cell.content()) for cell in cells]
        self._modes = (torch.is_grad_enabled(), torch.get_default_dtype())

    @torch.no_grad()
    def put_back(self) -> None:
        put_contents_back([pair for pair in self._contents if _has_changed(*pair)])
        for space, before in self._globals:
            for name in [name for name in space if name not in before]:
                del space[name]
            space.update({n: v for n, v in before.items() if space.get(n, space) is not v})
        for buffer in self._buffers:
            buffer.put_back()
        for param, gradient, wants in self._gradients:
            if param.grad is not gradient:
                param.grad = gradient
            if param.requires_grad is not wants:
                param.requires_grad_(wants)
        torch.set_default_dtype(self._modes[1])


def _is_table(cell: Cell) -> bool:
    """Whether it is data, which no step changes: mapped from a file, protected, or very large."""
    if not isinstance(cell, ArrayCell):
        return False
    array = cell.value
    return isinstance(array, np.memmap) or not array.flags.writeable or array.nbytes > _LARGE


def _has_changed(cell: Cell, before: Any) -> bool:
    """Whether a box holds other things than before; nobody else is to see it emptied."""
    if type(cell) is not BoxCell:
        return True
    now = cell.content()
    if isinstance(now, dict):
        return not (same([*now], [*before]) and same([*now.values()], [*before.values()]))
    return bool(now != before) if isinstance(now, set) else not same(now, before)


_MACHINERY = frozenset(vars(nn.Module())) - {"training"}


def _can_copy(buffer: Tensor) -> bool:
    return not buffer.is_meta and not nn.parameter.is_lazy(buffer)


def _spaces(frames: Iterable[FrameType]) -> list[dict[str, Any]]:
    """The global names of the modules that the frames are in."""
    return list({id(f.f_globals): f.f_globals for f in frames}.values())


class _Objects:
    """Walks through the user's own objects: lists, dicts, meters, trainers."""

    def __init__(self, census: Census) -> None:
        self._census = census
        self._left = _MOST_OBJECTS

    def walk(self, value: Any) -> None:
        if type(value) in (list, dict) and len(value) > _LONG:
            return  # a table of data, which no step changes
        self._census.value(value, "", "", self.enter)

    def enter(self, census: Census, value: Any, name: str, part: str) -> None:
        kind = type(value)
        if self._left > 0 and isinstance(value, _FUNCTIONS) and census.is_new(value):
            self._left -= 1
            for inner in _closed_over(value):
                self.walk(inner)
        if self._left <= 0 or isinstance(value, (*_NOT_STATE, nn.Module, Optimizer)):
            return
        self._left -= 1
        inside = getattr(value, "__dict__", None)
        if type(inside) is not dict or not is_users_class(kind) or not census.is_new(value):
            return
        census.attributes(value, "", "", enter=self.enter)


_FUNCTIONS = (types.FunctionType, types.MethodType)


def _closed_over(function: Any) -> Iterator[Any]:
    """What a function of the user's holds besides its code: a callback may collect things there."""
    if isinstance(function, types.MethodType):
        yield function.__self__
        function = function.__func__
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell.cell_contents


_NOT_STATE = (type, types.ModuleType, types.FunctionType, types.MethodType, threading.Thread)


class _Null(io.TextIOBase):
    """Takes what is printed and shows nothing."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def writable(self) -> bool:
        return True


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Show nothing of what is printed, logged or warned of."""
    manager = logging.root.manager
    before = manager.disable, sys.dont_write_bytecode
    with contextlib.ExitStack() as all_of_them:
        null = _Null()
        all_of_them.enter_context(contextlib.redirect_stdout(null))
        all_of_them.enter_context(contextlib.redirect_stderr(null))
        all_of_them.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        manager.disable, sys.dont_write_bytecode = logging.CRITICAL, True
        try:
            yield
        finally:
            manager.disable, sys.dont_write_bytecode = before


_guarded: list[int] = []  # the threads in which a replay runs
_is_installed = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _guarded or threading.get_ident() not in _guarded:
        return
    if event == "open":
        path, _, flags = args
        if flags & _WRITES and not str(path).startswith(("/dev/null", "/proc/")):
            raise ReplayEnded(f"it opens {path} for writing")
    elif event in _EFFECTS:
        raise ReplayEnded(f"it has an effect outside ({event})")


@contextlib.contextmanager
def _no_effects(*, taken: dict[int, Any], is_last: bool) -> Iterator[None]:
    """Let what the block writes go nowhere, and end it before it sends or starts anything.

    Only this thread is concerned; others go on as they were.
    """
    global _is_installed
    if not _is_installed:
        _is_installed = True
        sys.addaudithook(_hook)  # stays until the process ends; it asks one list
    ident = threading.get_ident()

    def instead_of(original: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (other if threading.get_ident() == ident else original)(*args, **kwargs)

        return call

    with contextlib.ExitStack() as all_of_them:
        opens = io.open
        others: list[tuple[Any, str, Callable[..., Any]]] = [
            *((owner, name, _do_nothing) for owner, name in _WRITERS),
            *((owner, name, _refuse) for owner, name in _SENDERS),
            *((owner, "open", functools.partial(_open_for_reading, opens)) for owner in _OPENERS),
        ]
        # Where a generator stands cannot be put back.
        found = () if is_last else living(types.GeneratorType)
        old = {id(each) for each in found if kind_of(each.gi_code) == USER}
        if old or taken:
            others.append((builtins, "next", functools.partial(_next_again, next, old, taken)))
        for owner, name, other in others:
            original = getattr(owner, name)
            setattr(owner, name, instead_of(original, other))
            all_of_them.callback(setattr, owner, name, original)
        all_of_them.enter_context(_open_files_aside())
        _guarded.append(ident)
        all_of_them.callback(_guarded.remove, ident)
        yield


# Nobody waits for what these give back, so a replay goes on without them. TensorBoard's writer, and
# others, hand what they are given to a thread of their own by a queue.
_WRITERS: list[tuple[Any, str]] = [
    *((torch, "save"), (torch.jit, "save"), (queue.Queue, "put"), (time, "sleep")),
    *((os, name) for name in ("rename", "replace", "remove", "unlink", "rmdir", "mkdir", "fsync")),
    *((shutil, name) for name in ("rmtree", "move", "copy", "copy2", "copyfile", "copytree")),
]
_SENDERS: list[tuple[Any, str]] = [
    (threading.Thread, "start"),
    *((socket.socket, name) for name in ("send", "sendall", "sendto", "sendmsg", "connect")),
]
_OPENERS = (builtins, io)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise ReplayEnded("it communicates with another process or machine")


def _next_again(
    original: Any, old: set[int], taken: dict[int, Any], iterator: Any, *default: Any
) -> Any:
    if id(iterator) in taken:
        return taken.pop(id(iterator))
    if id(iterator) in old and not is_forwarding(iterator.gi_code):
        raise ReplayEnded("it takes from a generator, which cannot be put back")
    return original(iterator, *default)


def _open_for_reading(
    original: Any,
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Open the file, or in its place one that keeps nothing if it is to be written."""
    if not isinstance(mode, str) or {"w", "a", "x", "+"}.isdisjoint(mode):
        return original(file, mode, buffering, encoding, errors, newline, *args, **kwargs)
    raw = _Nowhere()
    if "b" in mode and buffering == 0:
        return raw
    buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)


class _Nowhere(io.FileIO):
    """A file that keeps nothing but how long it is, and where one stands in it: zip files ask."""

    def __init__(self) -> None:
        super().__init__(os.devnull, "w+")
        self._at = self._end = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._at += size
        self._end = max(self._end, self._at)
        return size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._end}[whence]
        self._at = start + offset
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self._end = self._at if size is None else size
        return self._end


@contextlib.contextmanager
def _open_files_aside() -> Iterator[None]:
    """Let what is written to open files go nowhere.

    Their descriptors lead to the null device meanwhile. Files that other threads hold may be
    written by them just then: a write of ours to one of these ends the block instead.
    """
    files = [file for file in _open_files() if _descriptor(file) is not None]
    shared = _files_of_threads(files) if files else set()
    if any(_descriptor(file) in shared for file in _files_of_csv_writers()):
        raise ReplayEnded("a table is open that another thread may write")  # which nobody sees
    files = [file for file in files if _descriptor(file) not in shared]
    null = os.open(os.devnull, os.O_WRONLY)
    aside: list[tuple[int, int]] = []
    try:
        _flush(files)
        for number in {file.fileno() for file in files}:  # a text file has layers with the same
            aside.append((number, os.dup(number)))
            os.dup2(null, number)
        with _ended_by_writes(shared) if shared else contextlib.nullcontext():
            yield
    finally:
        _flush(files)
        for number, kept in aside:
            os.dup2(kept, number)
            os.close(kept)
        os.close(null)


def _flush(files: Iterable[Any]) -> None:
    # Text first: its characters go through the layers below.
    for file in sorted(files, key=lambda file: not isinstance(file, io.TextIOWrapper)):
        with contextlib.suppress(ValueError, OSError):
            file.flush()


def _open_files() -> list[Any]:
    """Files that are open for writing; the outermost layer of each."""
    standard = {id(each) for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}
    found = [file for kind in FILES for file in living(kind) if type(file) is kind]
    files = [each for each in found if not each.closed and id(each) not in standard]
    return [each for each in files if each.writable() and (_descriptor(each) or 0) > 2]


def _descriptor(file: Any) -> int | None:
    try:
        return int(file.fileno())
    except (OSError, ValueError):
        return None


def _files_of_threads(files: Iterable[Any]) -> set[int | None]:
    """The descriptors of those files that other threads hold; those of loaders and bars do not."""
    ours = threading.get_ident()
    quiet = ("QueueFeederThread", "pin_memory", "tqdm", "TMonitor", "stayfinite")
    frames = sys._current_frames()
    todo: deque[Any] = deque()
    for thread in threading.enumerate():
        is_quiet = any(word in f"{type(thread).__name__} {thread.name}" for word in quiet)
        if thread.ident == ours or thread is threading.main_thread() or is_quiet:
            continue
        todo.append(vars(thread))
        frame = frames.get(thread.ident or 0)
        while frame is not None:
            todo.append(variables_of(frame))
            frame = frame.f_back
    wanted, found, seen = {id(file) for file in files}, set[int | None](), set[int]()
    while todo and len(seen) < _MOST_OBJECTS:
        value = todo.popleft()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, Tensor, *_NOT_WALKED)):
            continue
        seen.add(id(value))
        if id(value) in wanted:
            found.add(_descriptor(value))
        if isinstance(value, types.FunctionType):
            todo.extend(value.__closure__ or ())  # not its module's names: all is reached by them
        else:
            todo.extend(gc.get_referents(value))
    return found


_NOT_WALKED = (type, types.ModuleType, types.FrameType, types.CodeType)


def _files_of_csv_writers() -> list[Any]:
    """What they write is written by C code to C code, so nobody can see it coming."""
    methods = [method for writer in living(CSV_WRITER) for method in gc.get_referents(writer)]
    return [each.__self__ for each in methods if hasattr(each, "__self__")]


@contextlib.contextmanager
def _ended_by_writes(shared: Container[int | None]) -> Iterator[None]:
    """End the block at the first write of this thread to one of these files."""
    before = sys.getprofile()

    def watch(frame: FrameType, event: str, called: Any) -> None:
        writes = event == "c_call" and called.__name__ in ("write", "writelines", "truncate")
        file = getattr(called, "__self__", None) if writes else None
        if isinstance(file, FILES) and _descriptor(file) in shared:
            raise ReplayEnded("it writes to a file that another thread may write")

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
