"""Where the script is made to stand still: before its bad step, and some steps earlier."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stayfinite.detect.entrypoints import wrapped
from stayfinite.explain.experiments.replays import CannotReplayError
from stayfinite.guard import Guard
from stayfinite.guard.lab.conditions import Conditions, Copies, copies_of, has_workers
from stayfinite.guard.lab.forks import Answer, Forks, GoOnError, Order, write
from stayfinite.guard.lab.replays import write_diagnosis
from stayfinite.guard.splitting import Split
from stayfinite.records import Incident, to_json

_EARLIER = 8  # steps
_BEYOND = 2


class Bench:
    """Makes the experiments of one process; in their children it gives the answers.

    What they say about the diagnosis is written to the file `result`.

    `guard` has to call `stepped` after every update. `leave(0)` ends the process at once.
    """

    def __init__(
        self,
        incident: Incident,
        *,
        folder: str,
        result: str,
        deadline: float,
        leave: Callable[[int], NoReturn],
    ) -> None:
        self._incident, self._deadline = incident, deadline
        self._folder, self._result = folder, result
        self._end: Callable[[], NoReturn] = functools.partial(leave, 0)
        self._bad = incident.step
        self._steps = max(0, min(_EARLIER, self._bad - 1))
        self._here = Forks(folder, name="here", leave=self._end)
        self._earlier: Forks | None = None
        self._copies: Copies = []
        self._order: Order | None = None
        self._conditions: Conditions | None = None
        self._pid = os.getpid()
        self._batch = Answer()
        self._guard: Guard | None = None

    @property
    def is_forking(self) -> bool:
        return self._here.is_forking or bool(self._earlier and self._earlier.is_forking)

    @property
    def is_child(self) -> bool:
        return self._order is not None and os.getpid() == self._pid

    def attach(self, guard: Guard) -> None:
        """Follow the script of this guard from its first step."""
        self._guard = guard
        wrapped(_BaseDataLoaderIter, "__next__", self._around_next)
        if self._bad == 0:
            self._hook = register_module_forward_pre_hook(self._entered)

    def stepped(self) -> None:
        """An update is over."""
        guard = self._guard
        if guard is None or os.getpid() != self._pid:
            return
        if self._order is not None:
            if self._has_passed(self._order, guard):
                self.answer(None)
        elif self._steps and guard.steps == self._bad - self._steps and not self._copies:
            self._look_back(guard)
        elif guard.steps == self._bad and not has_workers():
            self._stand(guard)

    def _has_passed(self, order: Order, guard: Guard) -> bool:
        if order.until is not None:
            return guard.clock >= order.until
        facts = self._incident.origin.facts if self._incident.origin else {}
        return guard.steps >= int(facts.get("noticed_step", self._bad)) + _BEYOND

    def _look_back(self, guard: Guard) -> None:
        """Keep the weights, and a process that can go on from here."""
        with guard.unseen():
            self._copies = copies_of(guard.evidence.optimizers())
        if has_workers() or not _may_fork():
            return
        self._earlier = Forks(self._folder, name="earlier", leave=self._end)
        try:
            self._earlier.hold()
        except GoOnError as go_on:
            self._go_on(go_on.order, guard)

    def _entered(self, module: nn.Module, args: Any) -> None:
        if self._guard is not None and not has_workers():
            self._stand(self._guard)

    def _around_next(self, original: Any) -> Any:
        def advance(iterator: Any) -> Any:
            batch = original(iterator)
            guard = self._guard
            if guard is None or os.getpid() != self._pid:
                return batch
            if self._order is None and guard.steps == self._bad:
                self._stand(guard)
            return self._handed_over(batch, guard)

        return advance

    def _handed_over(self, batch: Any, guard: Guard) -> Any:
        if self._order is None or self._conditions is None or guard.steps != self._bad:
            return batch
        if not self._batch.rows and self._batch.why_not is None:
            split, delivery = Split(batch), guard.delivery_of(batch)
            self._batch = Answer(
                rows=split.rows,
                values=split.values,
                why_not=split.why_not,
                indices=tuple(map(str, (delivery and delivery.indices) or ())),
                dataset="" if delivery is None else delivery.dataset,
            )
        try:
            return self._conditions.batch(batch)
        except Exception as error:
            self._leave(Answer(problem=f"the batch could not be changed: {error}"))

    def _stand(self, guard: Guard) -> None:
        """Make the experiments, and end; children return from here into the script."""
        if self._bad == 0:
            self._hook.remove()
        if not _may_fork():
            self._end()
        try:
            write_diagnosis(
                self._here,
                self._earlier,
                self._incident,
                path=self._result,
                steps=self._steps,
                seconds=self._deadline - time.time(),
            )
        except GoOnError as go_on:
            self._go_on(go_on.order, guard)
            return
        except CannotReplayError:
            pass
        self._end()

    def _go_on(self, order: Order, guard: Guard) -> None:
        self._pid, self._order = os.getpid(), order
        self._conditions = Conditions(guard, self._incident, order.change)
        try:
            self._conditions.begin(self._copies)
        except CannotReplayError as error:
            self._leave(Answer(problem=str(error)))

    def crashed(self, error: BaseException) -> None:
        """The script raised an error of its own in a child."""
        self._leave(Answer(problem=f"the step raised {type(error).__name__}"))

    def answer(self, incident: Incident | None) -> NoReturn:
        """Say what became of this child, and end it."""
        problem = None if self._conditions is None else self._conditions.problem()
        guard = self._guard
        assert guard is not None
        is_diverging = incident is not None and guard.is_diverging(incident)
        self._leave(
            dataclasses.replace(
                self._batch,
                incident=incident,
                problem=problem,
                clock=guard.incident_clock,
                is_diverging=is_diverging,
            )
        )

    def _leave(self, answer: Answer) -> NoReturn:
        assert self._order is not None
        write(self._order.answer, to_json(answer))
        self._end()


def _may_fork() -> bool:
    """Not where a device would be lost, or a thread that the script needs.

    The threads of a loader's queues and of a progress bar it does not need.
    """
    if torch.accelerator.is_available():
        return False
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    return all(
        thread.name.startswith("QueueFeederThread") or type(thread).__name__ == "TMonitor"
        for thread in others
    )


class LabGuard(Guard):
    """A guard that tells a bench of every update."""

    bench: Bench | None = None

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        """An update was attempted."""
        super().stepped(optimizer, vetoed=vetoed)
        if self.bench is not None:
            self.bench.stepped()
