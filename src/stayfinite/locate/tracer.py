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

from stayfinite.detect import walk
from stayfinite.detect.parts import unwrapped
from stayfinite.detect.scan import classify, summarize
from stayfinite.detect.veto import StepAside
from stayfinite.locate.arrivals import Arrivals
from stayfinite.locate.backward import NodeSites
from stayfinite.locate.events import Event, Site
from stayfinite.locate.facts import Facts
from stayfinite.locate.kinds import holds, is_meant, kind_of_event, read_for, wait_for, written_by
from stayfinite.locate.ops import Call, OpInfo, OpInfos, is_bad, tensors_in
from stayfinite.locate.provenance import Provenance
from stayfinite.locate.reads import Reads
from stayfinite.locate.samples import Delivery
from stayfinite.locate.source import Place, in_optimizer, user_place, user_places
from stayfinite.locate.storages import StorageMap, covers_storage
from stayfinite.records import HopKind, NaNType, Phase

_NOWHERE = Site(None)
_FRESH = ("aten.lift_fresh.default", "aten.lift_fresh_copy.default")


class Tracer(TorchDispatchMode):
    """Records an Event for every operation with a non-finite output while it is active.

    Values that were bad before it began show up as events of kind "foreign". It holds
    no tensor: memory is known by weak references.
    """

    def __init__(
        self,
        *,
        on_enter: Callable[[nn.Module, Any], None] | None = None,
        reads: Reads | None = None,
    ) -> None:
        super().__init__()
        self.clock = 0
        self._on_enter = on_enter
        self.is_paused = False
        self.count = 0
        self.nodes = NodeSites()
        self._arrivals = Arrivals(self.nodes)
        self._infos = OpInfos()
        self._bad: StorageMap[tuple[Event, ...]] = StorageMap()
        self._past = Provenance()
        self.facts = Facts(self._past, self.nodes, reads)
        self._modules: list[nn.Module] = []
        self._entry: Place | None = None
        self._handles: list[Any] = []
        self._aside = StepAside()

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
            self._past.labels.put(tensor, text)

    def delivered(self, delivery: Delivery, tensors: Iterable[Tensor]) -> None:
        """A loader has handed these over."""
        with self.paused():
            for tensor in map(unwrapped, tensors):
                self._past.delivered(tensor, delivery)
                for event in self._bad.get(tensor) or () if is_bad(tensor) else ():
                    event.facts["delivered"] = self.facts.of_delivery(tensor, delivery)

    def events_of(self, tensors: Iterable[Tensor]) -> list[Event]:
        """The latest events on the memory of those tensors that are bad now."""
        with self.paused():
            plain = [unwrapped(tensor) for tensor in tensors]
            found = [event for t in plain if is_bad(t) for event in self._sources(t, _NOWHERE)]
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
        try:
            if not self._modules:
                self._enter_root(module, args)
        except Exception:
            self._aside()
        self._modules.append(module)

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        self._entry = user_place(sys._getframe(2))
        self._arrivals.entered(module)
        with self.paused():
            for path, tensor in walk.named_tensors(args, "inputs"):
                self._past.entered(tensor, path)
                self.facts.entered(tensor, path)
            if self._on_enter is not None:
                self._on_enter(module, args)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules and not torch.compiler.is_compiling():
            self._modules.pop()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while it traces, and the wrapper is not cheap

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
        try:
            info = self._infos[func]
            if self.nodes.is_new():
                site = self._site(made_node=True)
                self.nodes.put(site)
                self._past.ran(site, info.base)
            call = Call(info, args, kwargs)
            written = written_by(call) if info.written else ()
            reads = written and not info.overwrites
            before = tuple(t for t in written if is_bad(t)) if reads else ()
        except Exception:
            self._aside()
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        try:
            if info.allocates:
                self._note_allocation(out)
            elif not info.is_view:
                self._look(call, out, written, before)
                if info.overwrites or not info.written:
                    self._past.made(info, args, out)
            elif info.name in _FRESH and is_bad(out):
                self._sources(out, self._site())
        except Exception:
            self._aside()
        return out

    def _look(
        self, call: Call, out: Any, written: tuple[Tensor, ...], before: tuple[Tensor, ...]
    ) -> None:
        if call.info.is_collective:
            wait_for(out)
        for tensor in written or tensors_in(out):
            if is_bad(tensor):
                self._record(call, tensor, written, before)
            elif written and self._bad and covers_storage(tensor):
                self._bad.drop(tensor)
        if self._past.has_unwritten:
            for tensor in written:
                self._past.written(tensor)

    def _record(
        self, call: Call, bad: Tensor, written: tuple[Tensor, ...], before: tuple[Tensor, ...]
    ) -> None:
        site, phase, node = self._where(call.info)
        given = read_for(call, bad, written)
        bad_inputs = [t for _, t in given if (holds(before, t) if holds(written, t) else is_bad(t))]
        parents = [event for t in bad_inputs for event in self._sources(t, site)]
        types = {classify(t) for t in bad_inputs if not holds(written, t)}
        types |= {event.nan_type for event in parents}
        nan_type = classify(bad)
        kind = kind_of_event(call, nan_type, types, site.place)
        event = self._event(kind, call.info.name, phase, site, nan_type, node, parents)
        if kind in ("birth", "conversion"):
            frame = sys._getframe(2)
            event.facts = self.facts.of_birth(call, given, bad, phase, site, frame)
            event.inputs = tuple(
                summarize(name, t) for name, t in given if t.numel() and not holds(written, t)
            )
            event.outputs = (summarize("output", bad),)
        else:
            event.facts = self.facts.of_spread(call, bad, sys._getframe(2))
        self._mark(bad, event, replace=bool(written) and covers_storage(bad))

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
        raw, label = self._past.unwritten(tensor), self._past.labels.get(tensor)
        kind: HopKind = "foreign" if raw is None else "allocation"
        phase: Phase = "init" if raw else "checkpoint" if label else "data"
        site = raw or site
        if phase == "data" and (arrival := self._arrivals.of(tensor)) is not None:
            phase, site = arrival
        summary = summarize(label or self._past.names.get(tensor) or "value", tensor)
        if kind == "foreign" and is_meant(summary, site.place):
            kind = "constant"
        event = self._event(kind, "", phase, site, summary.nan_type, None, ())
        event.outputs = (summary,)
        event.facts = self.facts.of_foreign(tensor, site, label, sys._getframe(2))
        self._mark(tensor, event, replace=True)
        return (event,)

    def next_step(self, clock: int) -> None:
        """The guard's clock has ticked."""
        self.clock = clock
        self._past.next_step()
        self.facts.roots = ()

    def _note_allocation(self, out: Any) -> None:
        site = self._site()
        for tensor in tensors_in(out):
            self._bad.drop(tensor)
            self._past.allocated(tensor, site)

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
