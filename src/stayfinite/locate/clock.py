"""The tracer, switched on from a tick of the clock, and what it says about a bad value."""

from __future__ import annotations

import bisect
import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.detect.hooks import Attachment, together
from stayfinite.distributed import world_size
from stayfinite.locate.provenance import BufferPlaces
from stayfinite.locate.samples import Deliveries, Delivery, Reads
from stayfinite.nested import named_tensors
from stayfinite.records import Origin

# The tracer is imported when it goes on, so that training which stays finite starts without it.
if TYPE_CHECKING:
    from stayfinite.locate.capture import Beginning, Kept
    from stayfinite.locate.provenance import Event, NodeSites
    from stayfinite.locate.tracer import Tracer

_NOTHING = contextlib.nullcontext()
_REMEMBERED = 4096  # updates; a value that went bad earlier has been noticed by then
# The tick, the steps of the busiest optimizer, the id of the one that stepped, and its own steps.
_Update = tuple[int, int, int, int]


class Tracing:
    """A tracer that may be off, with a clock that ticks at backward passes and updates."""

    def __init__(self, on_enter: Callable[[nn.Module, Any], None]) -> None:
        self.clock = 0
        self._on_enter = on_enter
        self._tracer: Tracer | None = None
        self._updates: deque[_Update] = deque(maxlen=_REMEMBERED)
        self._stance: Any = None
        self.keeps = False
        """Whether the inputs of the bad operation are kept, for a capsule."""
        self.kept: Kept | None = None
        self.beginning: Beginning | None = None
        self.on_delivery: Callable[[Any, FrameType | None], None] | None = None
        self._reads = Reads()
        self.buffers = BufferPlaces()
        self.deliveries = Deliveries(self._delivered)

    def watch_data(self, *, files: bool) -> Attachment:
        """Know the samples of the batches to come, and with `files` what they are read from."""
        if files:
            self._reads.listen()
        return together(Attachment(self._reads.stop), self.deliveries.watch())

    def _delivered(self, delivery: Delivery, batch: Any) -> None:
        if self.on_delivery is not None:
            self.on_delivery(batch, sys._getframe(1))
        if self._tracer is not None:
            tensors = [tensor for _, tensor in named_tensors(batch, "")]
            self._tracer.note_delivery(delivery, tensors)

    @property
    def nodes(self) -> NodeSites | None:
        """Where the nodes of the graph were made; None if not traced."""
        return None if self._tracer is None else self._tracer.nodes

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    def switch_on(self, *, is_brief: bool = False) -> None:
        """Look at every operation from now on; `is_brief`: nothing new is compiled meanwhile."""
        from stayfinite.locate.capture import KeptCalls
        from stayfinite.locate.tracer import Tracer

        self.kept = self.beginning = None
        calls = KeptCalls() if self.keeps else None
        self._tracer = Tracer(
            on_enter=self._on_enter, reads=self._reads, kept=calls, buffers=self.buffers
        )
        self._tracer.clock = self.clock
        for delivery, tensors in self.deliveries.recent():
            self._tracer.note_delivery(delivery, tensors)
        # A dispatch mode sees nothing inside compiled code. To say so imports what compiles, which
        # takes seconds; if nobody else has, nothing is compiled so far.
        may_compile = not is_brief or "torch._dynamo" in sys.modules
        self._stance = torch.compiler.set_stance("force_eager") if may_compile else None
        self._tracer.__enter__()

    def switch_off(self) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.__exit__(None, None, None)
            if self._stance is not None:
                self._stance.__exit__(None, None, None)  # the one that the user had set

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A time in which operations are not looked at."""
        return self.pause() or _NOTHING

    def pause(self) -> contextlib.AbstractContextManager[None] | None:
        """The same; None while the tracer is off."""
        return self._tracer.paused() if self._tracer is not None else None

    def tick(self, *, arm_at: int | None) -> None:
        """One more backward pass or update; at `arm_at` the tracer goes on."""
        self.clock += 1
        if self._tracer is not None:
            self._tracer.next_step(self.clock)
        elif self.clock == arm_at:
            self.switch_on()

    def tick_for_backward(self, roots: Sequence[Tensor], *, arm_at: int | None) -> None:
        """One more backward pass, from these roots."""
        self.tick(arm_at=arm_at)
        if self._tracer is not None:
            self.begin_backward(roots)

    def begin_backward(self, roots: Sequence[Tensor]) -> None:
        """The backward pass that runs now begins from these roots."""
        if self._tracer is not None:
            self._tracer.facts.roots = roots  # until the next tick

    def stepped(self, steps: int, *, of: Optimizer, count: int) -> None:
        """An update is over; the optimizer has attempted `count`, the busiest one `steps`."""
        self._updates.append((self.clock, steps, id(of), count))
        if self._tracer is not None:
            self._tracer.first_birth = None

    def clock_before(self, clock: int, *, steps: int) -> int:
        """The clock so many updates before."""
        earlier = [tick for tick, *_ in self._updates if tick < clock]
        return earlier[-steps - 1] if len(earlier) > steps else 0

    def note_carried(self, name: str, tensor: Tensor) -> None:
        """The step that is traced begins with this, which the one before has left in a variable."""
        if self._tracer is not None:
            self._tracer.note_carried(name, tensor)

    def label(self, tensor: Tensor, text: str) -> None:
        if self._tracer is not None:
            self._tracer.label([tensor], text)

    def origin(
        self, tensors: Iterable[Tensor], *, folder: str | None, of: Optimizer | None = None
    ) -> tuple[Origin, int | None] | None:
        """Where the bad ones among the tensors began, and in which step; None if not traced.

        Steps are those `of` an optimizer; of the busiest if it is not known.
        """
        if self._tracer is None:
            return None
        from stayfinite.locate.origin import origin_of

        found = origin_of(self._tracer.events_of(tensors), folder=folder)
        first = self._tracer.first_birth
        if first is not None and world_size() > 1 and _is_from_outside(found, first):
            found = origin_of([first], folder=folder)
        if found is None:
            return None
        origin, event = found
        if self._tracer.kept is not None:
            self.kept = self._tracer.kept.of(event)
            self.beginning = self._tracer.kept.beginning
        return origin, self._step_of(event, of)

    def was_computed(self, tensor: Tensor) -> bool:
        """Whether the tensor is bad by a computation, and not because somebody wrote it so."""
        if self._tracer is None:
            return False
        from stayfinite.locate.provenance import ancestors, guilty

        event = guilty(ancestors(self._tracer.events_of([tensor])))
        return event is not None and event.kind in ("birth", "conversion")

    def _step_of(self, event: Event, of: Optimizer | None) -> int | None:
        if event.kind in ("foreign", "allocation"):  # it was there before; what counts is its use
            return None
        # An update's own events carry the tick that it is booked under.
        find = bisect.bisect_left if event.phase == "optimizer" else bisect.bisect_right
        index = find(self._updates, event.clock, key=itemgetter(0))
        if not self._updates:  # no optimizer so far: the clock has ticked at backward passes only
            return max(0, event.clock - (event.phase == "backward"))
        before = list(self._updates)[:index]
        if of is None:
            return before[-1][1] if before else 0
        return next((count for _, _, key, count in reversed(before) if key == id(of)), 0)


def _is_from_outside(found: tuple[Origin, Event] | None, first: Event) -> bool:
    """Whether lineage ends at a collective, and this rank had made a bad value before that.

    What comes out of one was written by nobody here: shards of gradients, sums over ranks.
    """
    if found is None:
        return True
    event = found[1]
    is_foreign = event.kind == "foreign" and not event.facts.get("is_parameter")
    return first.order < event.order and (is_foreign or event.phase == "distributed")
