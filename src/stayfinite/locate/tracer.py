"""A dispatch mode that writes down where non-finite values are born and how they travel."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from stayfinite.detect.finite import classify
from stayfinite.detect.hooks import hear_no_hook_warning
from stayfinite.detect.memory import is_sharded_type, local, unwrap
from stayfinite.detect.summary import summarize
from stayfinite.detect.veto import STEP_FAILED
from stayfinite.living import Names, living
from stayfinite.locate.capture import KeptCalls, is_parameter
from stayfinite.locate.inputs import bad_columns, clauses, clauses_of_value
from stayfinite.locate.loss_terms import loss_sum, reaches, sum_facts
from stayfinite.locate.operators import (
    Call,
    Named,
    OpInfo,
    OpInfos,
    holds,
    is_bad,
    is_meant,
    kind_of_event,
    read_for,
    scalars,
    tensors_in,
    wait_for,
    written_by,
)
from stayfinite.locate.provenance import (
    Arrivals,
    BufferPlaces,
    Event,
    NodeSites,
    Provenance,
    Site,
    StorageMap,
    covers_storage,
    is_same_memory,
    running_node,
)
from stayfinite.locate.samples import Delivery, Reads, sample_under_way
from stayfinite.locate.source import Place, in_optimizer, library_place, own_place, user_places
from stayfinite.nested import named_tensors
from stayfinite.records import HopKind, NaNType, Phase
from stayfinite.safely import Safely

_NOWHERE = Site(None)
_FRESH = ("aten.lift_fresh.default", "aten.lift_fresh_copy.default")
_MANY = 300  # events in one step, of which each costs many times what its operation does


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
        kept: KeptCalls | None = None,
        buffers: BufferPlaces | None = None,
    ) -> None:
        super().__init__()
        self.clock = 0
        self.kept = kept
        self._on_enter = on_enter
        self.is_paused = False
        self.count = self._count_before = 0  # of events, and of those before this step
        self.nodes = NodeSites()
        self._arrivals = Arrivals(self.nodes)
        self._infos = OpInfos()
        self._bad: StorageMap[tuple[Event, ...]] = StorageMap()
        self._good: dict[int, weakref.ref[Tensor]] = {}  # in this step
        self._past = Provenance()
        self.first_birth: Event | None = None  # in the step under way
        self.facts = Facts(self._past, self.nodes, reads, buffers)
        self._modules: list[nn.Module] = []
        self._entry: Place | None = None
        self._handles: list[Any] = []
        self._safely = Safely(STEP_FAILED)

    def __enter__(self) -> Tracer:
        self._handles = [
            hear_no_hook_warning(),
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

    def note_carried(self, name: str, tensor: Tensor) -> None:
        """Say in which variable a tensor was carried from one step to the next."""
        self._past.carried.put(unwrap(tensor), name)

    def note_delivery(self, delivery: Delivery, tensors: Iterable[Tensor]) -> None:
        """A loader has handed these over."""
        with self.paused():
            for tensor in map(unwrap, tensors):
                self._past.note_delivery(tensor, delivery)
                for event in self._bad.get(tensor) or () if is_bad(tensor) else ():
                    with contextlib.suppress(Exception):
                        event.facts["delivered"] = self.facts.of_delivery(delivery, tensor)

    def events_of(self, tensors: Iterable[Tensor]) -> list[Event]:
        """The latest events on the memory of those tensors that are bad now."""
        with self.paused():
            plain = [unwrap(tensor) for tensor in tensors]
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
        except Exception as error:
            self._safely.note(error)
        self._modules.append(module)

    def _enter_root(self, module: nn.Module, args: Any) -> None:
        self._entry = own_place(sys._getframe(2))[0]
        self._arrivals.note_root(module)
        with self.paused():
            for path, tensor in named_tensors(args, "inputs"):
                self._past.note_entry(tensor, path)
                with contextlib.suppress(Exception):
                    self.facts.enter(tensor, path)
            if self._on_enter is not None:
                self._on_enter(module, args)
            if self.kept is not None:
                self.kept.begin(module, args, self.clock)

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
        if types and any(map(is_sharded_type, types)):
            return NotImplemented  # a DTensor's: it comes again as what it does to the shards
        if self.is_paused:
            return func(*args, **kwargs)
        try:
            info = self._infos.of(func)
            if self.nodes.is_new():
                site = self._site(made_node=True)
                self.nodes.put(site)
                self._past.note_run(site, info.base)
            call = Call(info, args, kwargs)
            written = written_by(call) if info.written else ()
            reads = written and not info.overwrites
            stays_good = info.keeps_finite and bool(args) and self._is_known_as_good(args[0])
            before = tuple(filter(self._is_bad, written)) if reads and not stays_good else ()
            if self.kept is not None:
                self.kept.note_before(written if reads else ())
        except Exception as error:
            self._safely.note(error)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        try:
            if self.kept is not None and self.nodes.latest_is_fresh():
                self.kept.note_forward(self.nodes.newest, call)
            if info.allocates:
                site = self._site()
                for tensor in tensors_in(out):
                    self._bad.drop(tensor)
                    self._past.note_allocation(tensor, site)
            elif not info.is_view:
                if not stays_good:
                    self._look(call, out, written, before)
                elif not written:
                    self._note_good(tensors_in(out))
                for tensor in written:
                    self._past.note_write(tensor)
                if info.overwrites or not info.written:
                    self._past.note_result(info, args, out)
            elif info.name in _FRESH and is_bad(out):
                self._sources(out, self._site())
        except Exception as error:
            self._safely.note(error)
        return out

    def _look(
        self, call: Call, out: Any, written: tuple[Tensor, ...], before: tuple[Tensor, ...]
    ) -> None:
        if call.info.is_collective:
            wait_for(out)
        for tensor in written or tensors_in(out):
            if is_bad(tensor):
                self._record(call, tensor, written, before)
                continue
            if written and self._bad and covers_storage(tensor):
                self._bad.drop(tensor)
            self._good[id(tensor)] = weakref.ref(tensor)

    def _note_good(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._good[id(tensor)] = weakref.ref(tensor)

    def _is_bad(self, tensor: Tensor) -> bool:
        return not self._is_known_as_good(tensor) and is_bad(tensor)

    def _is_known_as_good(self, tensor: Tensor) -> bool:
        """Whether it was looked at in this step, and nothing bad was put into its memory since."""
        known = self._good.get(id(tensor))
        return known is not None and known() is tensor and not self._bad.get(tensor)

    def _record(
        self, call: Call, bad: Tensor, written: tuple[Tensor, ...], before: tuple[Tensor, ...]
    ) -> None:
        given = read_for(call, bad, written)
        if self.count - self._count_before > _MANY:
            known = [event for _, t in given for event in self._bad.get(t) or ()]
            if any(event.nan_type is NaNType.NAN for event in known):
                self._bad.put(bad, tuple(dict.fromkeys(known))[-8:])
                return  # one of very many through which a NaN spreads
        site, phase, node = self._where(call.info)
        bad_inputs = [t for _, t in given if (holds(before, t) if holds(written, t) else is_bad(t))]
        parents = [event for t in bad_inputs for event in self._sources(t, site)]
        types = {classify(t) for t in bad_inputs if not holds(written, t)}
        types |= {event.nan_type for event in parents}
        nan_type = classify(bad)
        kind = kind_of_event(call, nan_type, types, site.innermost)
        event = self._event(kind, call.info.name, phase, site, nan_type, node, parents)
        if kind in ("birth", "conversion"):
            if self.kept is not None:
                self.kept.keep(event, call, bad)
            event.facts = self.facts.of_birth(call, given, bad, phase, site, sys._getframe(2))
            event.inputs = tuple(
                summarize(name, t) for name, t in given if t.numel() and not holds(written, t)
            )
            event.outputs = (summarize("output", bad),)
            if kind == "birth" and self.first_birth is None and not call.info.is_collective:
                self.first_birth = event
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
            for event in known:
                self.facts.meet_again(event, tensor)
            return known
        raw, label = self._past.site_of_unwritten(tensor), self._past.labels.get(tensor)
        kind: HopKind = "foreign" if raw is None else "allocation"
        phase: Phase = "init" if raw else "checkpoint" if label else "data"
        site = raw or site
        if phase == "data" and (arrival := self._arrivals.of(tensor)) is not None:
            phase, site = arrival
        summary = summarize(label or self._past.names.get(tensor) or "value", tensor)
        if kind == "foreign" and is_meant(summary, site.innermost):
            kind = "constant"
        event = self._event(kind, "", phase, site, summary.nan_type, None, ())
        event.outputs = (summary,)
        event.facts = self.facts.of_foreign(tensor, site, label, sys._getframe(2))
        self._mark(tensor, event, replace=True)
        return (event,)

    def next_step(self, clock: int) -> None:
        """The guard's clock has ticked."""
        self.clock, self._count_before = clock, self.count
        self._past.next_step()
        self._good.clear()
        self.facts.roots = ()
        if self.kept is not None:
            self.kept.next_step()

    def _site(self, *, made_node: bool = False) -> Site:
        place, inner = own_place(sys._getframe(2))
        if place is None and (node := running_node()) is not None:
            known = self.nodes.get(node)
            if known is not None:
                made_in, inner = known.made_in or node.name(), inner or known.inner
                return dataclasses.replace(known, made_in=made_in, inner=inner)
        entry = self._entry if self._modules else None
        modules = tuple(self._modules)
        return Site(place or inner, modules, entry, made_node, inner=inner if place else None)

    def _where(self, info: OpInfo) -> tuple[Site, Phase, str | None]:
        """Site, phase and autograd node of the operation that runs now."""
        made_node = self.nodes.latest_is_fresh()
        frame = sys._getframe(3)
        node = running_node()
        if node is None:
            phase: Phase = "distributed" if info.is_collective else "forward"
            phase = "optimizer" if in_optimizer(frame) else phase
            return self._site(made_node=made_node), phase, None
        if self.nodes.is_recomputation(frame):
            return self._site(made_node=made_node), "forward", None
        place, inner = own_place(frame)
        forward = self.nodes.get(node)
        if place is not None or inner is not None:  # a custom Function's backward, or a hook
            modules = forward.modules if forward else tuple(self._modules)
            entry = forward.entry if forward else None
            if place is None:  # one of a package, which the user's line has called in the forward
                place = forward.place if forward else None
            place, inner = (place, inner) if place else (inner, None)
            return Site(place, modules, entry, inner=inner), "backward", node.name()
        if forward is None:
            outer = user_places(frame, limit=1)
            forward = Site(outer[0] if outer else None)
        return forward, "backward", node.name()


_MOST = 16
_COPIES = ("aten._to_copy.default", "aten.clone.default")  # as of torch.from_numpy(x).float()


class Facts:
    """Plain values that say more of an event; what cannot be found out is left out.

    Among them is which samples of a dataset are in a bad tensor, and which files they are from.
    """

    def __init__(
        self,
        past: Provenance,
        nodes: NodeSites,
        reads: Reads | None,
        buffers: BufferPlaces | None,
    ) -> None:
        self._past, self._nodes = past, nodes
        self._buffers = buffers if buffers is not None else BufferPlaces()
        self._reads = reads if reads is not None else Reads()
        self._largest: dict[str, dict[str, Any]] = {}
        self._met_again: set[int] = set()  # events, by their order
        self.roots: Sequence[Tensor] = ()
        """Of the backward pass that runs now."""

    def of_birth(
        self,
        call: Call,
        given: list[Named],
        bad: Tensor,
        phase: Phase,
        site: Site,
        frame: FrameType | None,
    ) -> dict[str, Any]:
        """Facts of an operation that made a bad value of good ones, or a NaN of an Inf."""
        facts: dict[str, Any] = {
            "scalars": scalars(call),
            "data": [n for n, t in given if t.is_floating_point() and not t.requires_grad],
            "made_by": {n: made for n, t in given if (made := self._past.made_by(t))},
            "repeats": self._past.runs(site, call.info.base),
            "from_batch": [n for n, t in given if self._past.is_from_batch(t)],
            "uninitialised": [n for n, t in given if self._past.site_of_unwritten(t) is not None],
            "empty": [n for n, t in given if t.numel() == 0],
        }
        with contextlib.suppress(Exception):
            facts["measured"] = clauses(call, frame)
        if phase == "backward":
            facts |= {"consumers": self._nodes.consumers(), "made_in": site.made_in}
            with contextlib.suppress(Exception):
                facts["term"] = self._guilty_terms()
        with contextlib.suppress(Exception):
            deliveries = self._past.deliveries(t for _, t in given)
            of_one = deliveries if len(deliveries) == 1 else []
            facts["samples"] = self._samples(of_one, bad, frame)
            facts["largest_input"] = max(
                self._largest.values(), key=lambda found: found["value"], default=None
            )
        return _known_facts(facts) | self.of_spread(call, bad, frame)

    def of_spread(self, call: Call, bad: Tensor, frame: FrameType | None) -> dict[str, Any]:
        """Facts of an operation that was given a bad value."""
        facts: dict[str, Any] = {"inside": library_place(frame)}
        with contextlib.suppress(Exception):
            facts["sum"] = sum_facts(call, bad, frame)
        return _known_facts(facts)

    def of_foreign(
        self, tensor: Tensor, site: Site, label: str | None, frame: FrameType | None
    ) -> dict[str, Any]:
        """Facts of a bad value that no operation made, as far as was seen."""
        facts: dict[str, Any] = {"is_parameter": is_parameter(tensor), "label": label}
        with contextlib.suppress(Exception):
            if facts["is_parameter"]:
                whole = tensor if tensor._base is None else tensor._base
                facts["parameter"] = Names().tensor(whole)
            is_state = bool(facts["is_parameter"] or label)
            state = {} if is_state else self._state(tensor)
            facts |= state or {"samples": self._samples_of_table(tensor, site.place, frame)}
            if not (is_state or state):
                facts["measured"] = clauses_of_value(tensor, frame)
                facts["columns"] = bad_columns(tensor)
                facts["computed"] = tensor.grad_fn is not None or None
        return facts

    def meet_again(self, event: Event, tensor: Tensor) -> None:
        """What came in bad is read: by now a module may have it as a buffer."""
        if event.order in self._met_again:
            return
        self._met_again.add(event.order)
        while event.op in _COPIES and len(event.parents) == 1:
            event = event.parents[0]
        if event.kind == "foreign" and event.phase == "data":
            event.facts |= self._state(tensor)

    def _state(self, tensor: Tensor) -> dict[str, Any]:
        """Of which module the tensor is a buffer, or in which variable it was carried, if any."""
        for module in living(nn.Module):
            for name, buffer in module._buffers.items():
                if buffer is not None and is_same_memory(buffer, tensor):
                    whole = summarize(name, buffer)
                    found = {
                        "name": name,
                        "module": type(module).__name__,
                        "given_at": self._buffers.of(module, name),
                        "first_bad": list(whole.first_bad_index or ()),
                        "bad_count": whole.bad_count,
                        "numel": whole.numel,
                    }
                    return {"buffer": found}
        variable = self._past.carried.get(tensor)
        return {} if variable is None else {"carried": variable}

    def of_delivery(self, delivery: Delivery, bad: Tensor) -> dict[str, Any]:
        """The rows of a loader's batch in which the tensor is bad, and their samples."""
        samples = delivery.indices
        found: dict[str, Any] = {"batch": delivery.number, "dataset": delivery.dataset}
        size = _size(delivery) if samples is None else len(samples)
        dim = _batch_dim(bad, size)
        if dim is not None:
            found |= _bad_rows(bad, dim)
        if size is not None:
            found["size"] = size
        if samples is not None:
            rows = found.get("rows") or range(len(samples))
            found["samples"] = [_plain(samples[row]) for row in rows[:_MOST]]
            if found.get("row_count") == 1:
                files = self._reads.for_sample(found["samples"][0])
                found |= {"files": files[-2:]} if files else {}
        return found

    def enter(self, tensor: Tensor, path: str) -> None:
        """A top-level module is given this: where is its largest value?"""
        tensor = local(tensor)
        is_plain = tensor.layout is torch.strided and tensor.is_floating_point()
        if not is_plain or not tensor.numel() or tensor.requires_grad:
            return
        sizes = tensor.detach().abs()
        place = torch.unravel_index(sizes.argmax(), sizes.shape)
        index = [int(number) for number in place]
        found: dict[str, Any] = {"path": path, "index": index, "value": float(sizes.max())}
        deliveries = self._past.deliveries([tensor])
        samples = deliveries[0].indices if len(deliveries) == 1 else None
        if samples is not None and index and len(samples) == tensor.shape[0]:
            found |= {"sample": _plain(samples[index[0]]), "dataset": deliveries[0].dataset}
        self._largest[path] = found

    def _guilty_terms(self) -> dict[str, Any] | None:
        """The terms of the loss whose backward pass comes to the node that runs now."""
        node, found = running_node(), loss_sum(self.roots, self._nodes)
        if node is None or found is None:
            return None
        terms = [[term.name, reaches(term, node)] for term in found.terms]
        return {"where": [found.file, found.line], "terms": terms}

    def _samples(
        self, deliveries: list[Delivery], bad: Tensor, frame: FrameType | None
    ) -> dict[str, Any] | None:
        """The samples behind a bad value: one that is being read, or those of a batch."""
        sample = sample_under_way(frame)
        if sample is not None:
            files = self._reads.for_sample(sample)
            found: dict[str, Any] = {"reading": _plain(sample)}
            return found | ({"files": files[-2:]} if files else self._last_file())
        return self.of_delivery(deliveries[0], bad) | self._last_file() if deliveries else None

    def _samples_of_table(
        self, bad: Tensor, place: Place | None, frame: FrameType | None
    ) -> dict[str, Any]:
        """The same of a value that nobody computed here, and which may be a whole table."""
        found = self._samples(self._past.deliveries([bad]), bad, frame)
        if found is not None:
            return found
        found = {"table": list(bad.shape)} | _bad_rows(bad, 0)
        found |= _in_whole_table(bad, found.get("rows", []))
        own = self._reads.by(place.code) if place is not None else None
        return found | ({"files": [own]} if own is not None else self._last_file())

    def _last_file(self) -> dict[str, Any]:
        last = self._reads.latest()
        return {} if last is None else {"last_file": last, "only_file": self._reads.count == 1}


def _known_facts(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value not in (None, [], {})}


def _batch_dim(tensor: Tensor, size: int | None) -> int | None:
    """The dimension that counts the samples; None if that cannot be told."""
    if not size or not tensor.dim():
        return None
    if tensor.shape[0] == size:
        return 0
    fitting = [dim for dim, length in enumerate(tensor.shape) if length == size]
    return fitting[0] if len(fitting) == 1 and size > 1 else None


def _bad_rows(tensor: Tensor, dim: int) -> dict[str, Any]:
    """The rows that hold a bad value, and how many they are."""
    tensor = local(tensor)
    if not tensor.dim() or tensor.layout is not torch.strided:
        return {}
    bad = ~torch.isfinite(tensor.detach())
    rows = bad.movedim(dim, 0).reshape(tensor.shape[dim], -1).any(1).nonzero().flatten().tolist()
    return {"rows": rows[:_MOST], "row_count": len(rows)}


def _in_whole_table(part: Tensor, rows: list[int]) -> dict[str, Any]:
    """The rows of a slice as rows of the tensor that it was cut from; {} if it was not."""
    whole = part._base
    if whole is None or not rows or part.shape[1:] != whole.shape[1:]:
        return {}
    if part.stride() != whole.stride() or not whole.stride(0):
        return {}
    first = (part.storage_offset() - whole.storage_offset()) // whole.stride(0)
    return {"table": list(whole.shape), "rows": [first + row for row in rows]}


def _size(delivery: Delivery) -> int | None:
    """How many rows all tensors of the batch have; None if they do not agree."""
    living = [tensor for ref in delivery.tensors if (tensor := ref()) is not None]
    sizes = {tensor.shape[0] for tensor in living if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def _plain(sample: Any) -> Any:
    return sample if isinstance(sample, (int, str)) else str(sample)
