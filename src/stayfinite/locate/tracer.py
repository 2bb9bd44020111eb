"""A dispatch mode that writes down where non-finite values are born and how they travel."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from stayfinite.detect.scan import classify, summarize
from stayfinite.locate.backward import NodeSites
from stayfinite.locate.events import Event, Site
from stayfinite.locate.ops import (
    OpInfo,
    is_bad,
    learn,
    named_tensors,
    nonfinite_constants,
    scalars,
    tensors_in,
)
from stayfinite.locate.source import (
    Place,
    in_optimizer,
    library_place,
    user_place,
    user_places,
)
from stayfinite.locate.storages import StorageMap, covers_storage
from stayfinite.records import HopKind, NaNType, Phase

_FRESH = ("aten.lift_fresh.default", "aten.lift_fresh_copy.default")


class Tracer(TorchDispatchMode):
    """Records an Event for every operation with a non-finite output while it is active.

    Values that were bad before it began show up as events of kind "foreign". It holds
    no tensor: memory is known by weak references.
    """

    def __init__(self, *, on_enter: Callable[[nn.Module, Any], None] | None = None) -> None:
        super().__init__()
        self.clock = 0
        self._on_enter = on_enter
        self.is_paused = False
        self.count = 0
        self.nodes = NodeSites()
        self._infos: dict[Any, OpInfo] = {}
        self._bad: StorageMap[tuple[Event, ...]] = StorageMap()
        self._raw: StorageMap[tuple[Site, int]] = StorageMap()
        self._labels: StorageMap[str] = StorageMap()
        self._made: StorageMap[tuple[str, ...]] = StorageMap()
        self._runs: dict[Place | None, int] = {}
        self._runs_before: dict[Place | None, int] = {}
        self._modules: list[nn.Module] = []
        self._entry: Place | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> Tracer:
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def label(self, tensors: Iterable[Tensor], text: str) -> None:
        """Say where tensors came from ("checkpoint last.pt"), for the case that they are bad."""
        for tensor in tensors:
            self._labels.put(tensor, text)

    def events_of(self, tensors: Iterable[Tensor]) -> list[Event]:
        """The latest events on the memory of those tensors that are bad now."""
        with self.paused():
            found = [event for t in tensors if is_bad(t) for event in self._sources(t, _NOWHERE)]
        return list(dict.fromkeys(found))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A time in which operations are not looked at: our own."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._modules:
            self._entry = user_place(sys._getframe(1))
            if self._on_enter is not None:
                with self.paused():
                    self._on_enter(module, args)
        self._modules.append(module)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules and not torch.compiler.is_compiling():
            self._modules.pop()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = learn(func)
        if self.nodes.is_new():
            site = self._site(made_node=True)
            self.nodes.put(site)
            self._runs[site.place] = self._runs.get(site.place, 0) + 1
        before = self._bad_before(info, args, kwargs) if info.written else ()
        out = func(*args, **kwargs)
        if info.allocates:
            self._note_raw(out)
        elif not info.is_view:
            self._look(info, args, kwargs, out, before)
            self._note_made(info, args, out)
        elif info.name in _FRESH and is_bad(out):
            self._sources(out, self._site())
        return out

    def _bad_before(
        self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        if info.overwrites:
            return ()
        return tuple(t for t in _written(info, args, kwargs) if is_bad(t))

    def _look(
        self,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        before: tuple[Tensor, ...],
    ) -> None:
        if info.is_collective:
            _wait(out)
        written = _written(info, args, kwargs) if info.written else ()
        for tensor in written or tensors_in(out):
            if is_bad(tensor):
                self._record(info, args, kwargs, tensor, written, before)
            elif written and covers_storage(tensor):
                self._bad.drop(tensor)
        for tensor in written:
            self._note_written(tensor)

    def _record(
        self,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bad: Tensor,
        written: tuple[Tensor, ...],
        before: tuple[Tensor, ...],
    ) -> None:
        site, phase, node = self._where(info)
        given = _relevant(info, named_tensors(info, args, kwargs), bad, written)
        bad_inputs = [
            t
            for _, t in given
            if (any(t is b for b in before) if _holds(written, t) else is_bad(t))
        ]
        parents = [event for t in bad_inputs for event in self._sources(t, site)]
        kinds = {classify(t) for t in bad_inputs if not _holds(written, t)}
        kinds |= {event.nan_type for event in parents}
        nan_type = classify(bad)
        kind = _kind(info, args, kwargs, nan_type, kinds)
        event = self._event(kind, info.name, phase, site, nan_type, node, parents)
        if kind in ("birth", "conversion"):
            event.facts = self._facts(info, args, kwargs, given, phase, site)
            event.inputs = tuple(
                summarize(name, t) for name, t in given if t.numel() and not _holds(written, t)
            )
            event.outputs = (summarize("output", bad),)
        elif (inside := library_place(sys._getframe(2))) is not None:
            event.facts = {"inside": inside}
        self._mark(bad, event, replace=bool(written) and covers_storage(bad))

    def _facts(
        self,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[tuple[str, Tensor]],
        phase: Phase,
        site: Site,
    ) -> dict[str, Any]:
        facts: dict[str, Any] = {"scalars": scalars(info, args, kwargs)}
        inside = library_place(sys._getframe(3))
        if inside is not None:
            facts["inside"] = inside
        facts["data"] = [n for n, t in given if not t.requires_grad and t.is_floating_point()]
        raw = [name for name, tensor in given if self._raw.get(tensor) is not None]
        if raw:
            facts["uninitialised"] = raw
        facts["made_by"] = {n: list(made) for n, t in given if (made := self._made.get(t))}
        facts["repeats"] = max(self._runs.get(site.place, 0), self._runs_before.get(site.place, 0))
        if phase == "backward":
            facts["consumers"] = self.nodes.consumers()
            facts["made_in"] = site.made_in
        labels = {name: label for name, t in given if (label := self._labels.get(t)) is not None}
        if labels:
            facts["labels"] = labels
        empty = [name for name, tensor in given if tensor.numel() == 0]
        if empty:
            facts["empty"] = empty
        return facts

    def _event(
        self,
        kind: HopKind,
        op: str,
        phase: Phase,
        site: Site,
        nan_type: NaNType,
        node: str | None,
        parents: Iterable[Event],
    ) -> Event:
        self.count += 1
        return Event(
            order=self.count,
            kind=kind,
            op=op,
            phase=phase,
            site=site,
            nan_type=nan_type,
            clock=self.clock,
            node=node,
            parents=tuple(dict.fromkeys(parents)),
        )

    def _mark(self, tensor: Tensor, event: Event, *, replace: bool) -> None:
        known = () if replace else self._bad.get(tensor) or ()
        self._bad.put(tensor, (*known[-7:], event))

    def _sources(self, tensor: Tensor, site: Site) -> tuple[Event, ...]:
        """The events behind a bad tensor; a first meeting makes one of kind foreign."""
        known = self._bad.get(tensor)
        if known:
            return known
        raw = self._raw.get(tensor)
        label = self._labels.get(tensor)
        kind: HopKind = "foreign" if raw is None else "allocation"
        phase: Phase = "init" if raw else "checkpoint" if label else "data"
        event = self._event(kind, "", phase, raw[0] if raw else site, classify(tensor), None, ())
        event.outputs = (summarize(label or "value", tensor),)
        event.facts = {"is_parameter": isinstance(tensor, nn.Parameter), "label": label}
        self._mark(tensor, event, replace=True)
        return (event,)

    def _note_made(self, info: OpInfo, args: tuple[Any, ...], out: Any) -> None:
        """Remember by which operation a value was made, and by which ones its inputs were."""
        made = (info.base, *(self._made.get(t) or ("",) for t in args if isinstance(t, Tensor)))
        known = tuple(name if isinstance(name, str) else name[0] for name in made)
        for tensor in (out,) if isinstance(out, Tensor) else tensors_in(out):
            self._made.put(tensor, known)

    def next_step(self, clock: int) -> None:
        """The guard's clock has ticked."""
        self.clock = clock
        self._runs_before, self._runs = self._runs, {}

    def _note_raw(self, out: Any) -> None:
        for tensor in tensors_in(out):
            self._bad.drop(tensor)
            if tensor.is_floating_point() and tensor.numel():
                self._raw.put(tensor, (self._site(), tensor.numel()))

    def _note_written(self, tensor: Tensor) -> None:
        raw = self._raw.get(tensor)
        if raw is not None:
            left = raw[1] - tensor.numel()
            if left > 0:
                self._raw.put(tensor, (raw[0], left))
            else:
                self._raw.drop(tensor)

    def _site(self, *, made_node: bool = False) -> Site:
        place = user_place(sys._getframe(2))
        if place is None and (node := torch._C._current_autograd_node()) is not None:
            known = self.nodes.get(node)
            if known is not None:
                return dataclasses.replace(known, made_in=known.made_in or node.name())
        entry = self._entry if self._modules else None
        return Site(place, tuple(self._modules), entry, made_node)

    def _where(self, info: OpInfo) -> tuple[Site, Phase, str | None]:
        """Site, phase and autograd node of the operation that runs now."""
        made_node = self.nodes.latest_is_fresh()
        frame = sys._getframe(3)
        node = torch._C._current_autograd_node()
        if node is None:
            phase: Phase = "distributed" if info.is_collective else "forward"
            phase = "optimizer" if in_optimizer(frame) else phase
            return self._site(made_node=made_node), phase, None
        if self.nodes.is_recomputation(frame):
            return self._site(made_node=made_node), "forward", None
        place = user_place(frame)
        forward = self.nodes.get(node)
        if place is not None:  # a custom Function's backward, or a hook
            modules = forward.modules if forward else tuple(self._modules)
            return Site(place, modules, forward.entry if forward else None), "backward", node.name()
        if forward is None:
            outer = user_places(frame, limit=1)
            forward = Site(outer[0] if outer else None)
        return forward, "backward", node.name()


_NOWHERE = Site(None)


def _holds(tensors: Iterable[Tensor], tensor: Tensor) -> bool:
    return any(tensor is other for other in tensors)


def _written(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    values = [args[i] for i in info.written if i < len(args)]
    values += [kwargs[name] for name in info.written_names if name in kwargs]
    return tuple(tensors_in(values))


def _relevant(
    info: OpInfo,
    given: list[tuple[str, Tensor]],
    bad: Tensor,
    written: tuple[Tensor, ...],
) -> list[tuple[str, Tensor]]:
    """What the bad output was computed from: of a foreach list only the members beside it."""
    if info.overwrites:
        given = [(name, t) for name, t in given if not _holds(written, t)]
    if not info.base.startswith(("_foreach_", "_fused_")):
        return given
    index = next((name.rpartition("[")[2] for name, t in given if t is bad), None)
    if index is None:
        return given
    return [(name, t) for name, t in given if not name.endswith("]") or name.endswith(f"[{index}")]


def _kind(
    info: OpInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nan_type: NaNType,
    kinds: set[NaNType],
) -> HopKind:
    if kinds:
        return "conversion" if nan_type is NaNType.NAN and NaNType.NAN not in kinds else "spread"
    constants = nonfinite_constants(args, kwargs)
    if constants and info.fills:
        meant = any(c != c for c in constants) and info.base.startswith(("full", "fill", "masked"))
        if meant or nan_type is not NaNType.NAN:
            return "constant"
    return "birth"


def _wait(out: Any) -> None:
    # A collective returns before its data has arrived.
    work: Any = out[-1] if isinstance(out, (list, tuple)) and out else None
    if hasattr(work, "wait"):
        work.wait()
