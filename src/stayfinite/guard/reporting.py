"""A watcher that can be asked what it has seen."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from stayfinite.distributed import rank
from stayfinite.errors import CapsuleError
from stayfinite.guard.job import Job
from stayfinite.guard.watcher import Watcher
from stayfinite.records import Incident, Origin

# What only a bad step needs is imported there: a healthy run starts without it.
if TYPE_CHECKING:
    from stayfinite.capsule.making import Redact
    from stayfinite.guard.kept import Call, KeptStep
    from stayfinite.locate.backward import NodeSites
    from stayfinite.locate.keeping import Beginning, Kept
    from stayfinite.locate.samples import Delivery
    from stayfinite.report.html.notebook import GuardReport


class ReportingWatcher(Watcher):
    """Watches, and tells of it when it is asked."""

    _kept_step: KeptStep | None = None
    examined: Sequence[tuple[Any, ...]] = ()
    """The places that experiments were made for."""

    def report(self) -> GuardReport:
        """The incidents so far, shown inline in a notebook and as text when printed."""
        from stayfinite.explain.causes import CAUSES
        from stayfinite.report.html.notebook import GuardReport

        folder = Path(self.settings.folder) if self.settings.folder else None
        return GuardReport(self.incidents, steps=self.steps, causes=CAUSES, folder=folder)

    def capsule(
        self,
        path: str | os.PathLike[str],
        *,
        with_batch: bool = False,
        with_source: bool = True,
        redact: Redact | None = None,
    ) -> Path:
        """Write the last bad step that `step` ran into one file, which `stayfinite replay` runs.

        It has the state before the step, the generators, the guilty operation, versions, and your
        own source files. `with_batch` adds the batch, as `redact(batch)` gives it; without it
        only statistics of what was computed from data are in the file. Nothing is pickled.
        """
        from stayfinite.capsule.making import check_redaction
        from stayfinite.capsule.writing import write_capsule

        check_redaction(redact, with_batch=with_batch)
        kept = self._kept_step
        same = [each for each in self.incidents if kept is not None and each.step == kept.step]
        if kept is None or not same:
            raise CapsuleError(
                "there is no bad step to put into a capsule: guard.step has to have run one. For "
                "a script as it is: stayfinite run --capsule FILE."
            )
        if same[-1].rank not in (rank(), -1):
            raise CapsuleError(
                f"the step went bad on rank {same[-1].rank}: call guard.capsule there."
            )
        made = kept.capsule(same[-1], with_batch=with_batch, with_source=with_source, redact=redact)
        return write_capsule(path, made)

    def keep_step(self, job: Job, calls: list[Call], *, step: int) -> None:
        """Remember a bad step whose beginning has just been put back."""
        with self._aside:
            from stayfinite.guard.kept import keep_step

            self._kept_step = keep_step(job, calls, self._tracing.kept, step=step)

    def delivery_of(self, batch: Any, *, exactly: bool = False) -> Delivery | None:
        """The batch of a loader that this is; None if none is known."""
        return self._tracing.deliveries.of(batch, exactly=exactly)

    def node_sites(self) -> NodeSites | None:
        """Where the nodes of the graph were made; None if not traced now."""
        return self._tracing.nodes

    def is_diverging(self, incident: Incident, optimizer: Optimizer | None = None) -> bool:
        """Whether training was running away before the incident; by default by the busiest."""
        from stayfinite.explain.clue import Clue

        context = self.evidence.context(optimizer, step=incident.step, locations=())
        origin = incident.origin if incident.origin is not None else Origin(phase="forward")
        return Clue(origin, context).is_diverging

    def traced_pass(self) -> tuple[Kept | None, Beginning | None]:
        """What the guilty operation of the last incident was given, and how its pass began."""
        return self._tracing.kept, self._tracing.beginning

    @property
    def incident_clock(self) -> int | None:
        """The tick at which the first incident was noticed."""
        return self._incident_clock

    @property
    def clock(self) -> int:
        """Backward passes and updates so far."""
        return self._tracing.clock

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """A time in which operations are not looked at."""
        return self._tracing.paused()

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """A time in which every operation is looked at."""
        was_on = self._tracing.is_on
        if not was_on:
            self._tracing.switch_on()
        try:
            yield
        finally:
            if not was_on:
                self._tracing.switch_off()

    def trace_no_more(self) -> None:
        """Do not trace from here on."""
        self._tracing.switch_off()

    def keep_operations(self) -> None:
        """Keep what the guilty operation was given, in steps that are traced from now on."""
        self._tracing.keeps = True
