"""Experiments on a script: it is run to its bad step, and goes on from there in many ways."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stayfinite.detect.hooks import wrapped
from stayfinite.explain.experiments import (
    CannotReplayError,
    Change,
    Finding,
    Lab,
    Seen,
    experiment,
    judged,
    with_reason,
    with_samples,
)
from stayfinite.files import replace_file
from stayfinite.guard.conditions import Split, clip_updates, multiply_scale
from stayfinite.guard.guard import Guard
from stayfinite.guard.replay import higher_dtype, kept_inside, seen_of
from stayfinite.living import living
from stayfinite.locate.loss_terms import only_term
from stayfinite.nested import map_leaves
from stayfinite.records import Diagnosis, Incident, from_json, to_json
from stayfinite.recover.actions import lower_rates, schedulers_of
from stayfinite.recover.float32 import raised
from stayfinite.training import params_of

_EARLIER = 8  # steps
_BEYOND = 2


class Bench:
    """Makes the experiments of one process; in their children it gives the answers.

    What they say about the diagnosis is written to the file `result`.

    `leave(0)` ends the process at once.
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
        self._order: ForkOrder | None = None
        self._conditions: Conditions | None = None
        self._pid = os.getpid()
        self._batch = ForkAnswer()
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
        wrapped(guard, "stepped", self._after_step)
        wrapped(_BaseDataLoaderIter, "__next__", self._around_next)
        if self._bad == 0:
            self._hook = register_module_forward_pre_hook(self._entered)

    def _after_step(self, original: Any) -> Any:
        def stepped(optimizer: Optimizer, *, vetoed: bool | None) -> None:
            original(optimizer, vetoed=vetoed)
            self._stepped()

        return stepped

    def _stepped(self) -> None:
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

    def _has_passed(self, order: ForkOrder, guard: Guard) -> bool:
        if order.until is not None:
            return guard.past.tracing.clock >= order.until
        facts = self._incident.origin.facts if self._incident.origin else {}
        return guard.steps >= int(facts.get("noticed_step", self._bad)) + _BEYOND

    def _look_back(self, guard: Guard) -> None:
        """Keep the weights, and a process that can go on from here."""
        with guard.past.tracing.paused():
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
            split, delivery = Split(batch), guard.past.tracing.deliveries.of(batch)
            self._batch = ForkAnswer(
                rows=split.rows,
                values=split.values,
                why_not=split.why_not,
                indices=tuple(map(str, (delivery and delivery.indices) or ())),
                dataset="" if delivery is None else delivery.dataset,
            )
        try:
            return self._conditions.batch(batch)
        except Exception as error:
            self._leave(ForkAnswer(problem=f"the batch could not be changed: {error}"))

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

    def _go_on(self, order: ForkOrder, guard: Guard) -> None:
        self._pid, self._order = os.getpid(), order
        self._conditions = Conditions(guard, self._incident, order.change)
        try:
            self._conditions.begin(self._copies)
        except CannotReplayError as error:
            self._leave(ForkAnswer(problem=str(error)))

    def crashed(self, error: BaseException) -> None:
        """The script raised an error of its own in a child."""
        self._leave(ForkAnswer(problem=f"the step raised {type(error).__name__}"))

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
                clock=guard.past.incident_clock,
                is_diverging=is_diverging,
            )
        )

    def _leave(self, answer: ForkAnswer) -> NoReturn:
        assert self._order is not None
        replace_file(self._order.answer, to_json(answer))
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


_PAUSE = 0.003


@dataclass(frozen=True, kw_only=True)
class ForkOrder:
    """How a child goes on, where it writes its answer, and when it has passed the bad step.

    `until` is the tick of the clock at which the step goes bad; None while that is not known.
    """

    change: Change
    answer: str
    until: int | None = None


@dataclass(frozen=True, kw_only=True)
class ForkAnswer:
    """What became of a child; `problem` says why nothing can be said.

    The rest describes the step: the tick at which it went bad, and the batch of a loader.
    """

    incident: Incident | None = None
    problem: str | None = None
    clock: int | None = None
    is_diverging: bool = False
    rows: int = 0
    values: int = 0
    indices: tuple[str, ...] = ()
    dataset: str = ""
    why_not: str | None = None


class GoOnError(BaseException):
    """Carries a child out of the experiments and back into the script."""

    def __init__(self, order: ForkOrder) -> None:
        super().__init__()
        self.order = order


class Forks:
    """Children of the process that it is made in."""

    def __init__(self, folder: str, *, name: str, leave: Callable[[], NoReturn]) -> None:
        self._folder, self._name, self._leave = folder, name, leave
        self._count = 0
        self.is_forking = False
        self._holder: int | None = None

    def hold(self) -> None:
        """Leave a child behind that goes on from here whenever `ask` is called."""
        parent, number = os.getpid(), 0
        pid = self._fork()
        if pid:
            self._holder = pid
            return
        while True:
            number += 1
            while not os.path.exists(self._path("order", number)):
                if os.getppid() != parent:
                    self._leave()
                time.sleep(_PAUSE)
            with open(self._path("order", number), encoding="utf-8") as file:
                order = from_json(ForkOrder, file.read())
            if not self._fork():
                raise GoOnError(order)
            with contextlib.suppress(ChildProcessError):
                os.wait()

    def ask(self, change: Change, *, until: int | None, seconds: float) -> ForkAnswer:
        """What becomes of the script under this change; raises GoOnError in the child.

        CannotReplayError if there is no answer.
        """
        self._count += 1
        path = self._path("answer", self._count)
        order = ForkOrder(change=change, answer=path, until=until)
        if self._holder is not None:
            replace_file(self._path("order", self._count), to_json(order))
            return _waited_for(path, seconds=seconds, pid=None)
        pid = self._fork()
        if not pid:
            raise GoOnError(order)
        with _ended(pid):
            return _waited_for(path, seconds=seconds, pid=pid)

    def _fork(self) -> int:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self.is_forking = True
        try:
            return os.fork()
        finally:
            self.is_forking = False

    def _path(self, what: str, number: int) -> str:
        return os.path.join(self._folder, f"{what}-{self._name}-{number}.json")


def _waited_for(path: str, *, seconds: float, pid: int | None) -> ForkAnswer:
    end = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > end:
            raise CannotReplayError("it took too long")
        if pid is not None and os.waitpid(pid, os.WNOHANG)[0] and not os.path.exists(path):
            raise CannotReplayError("the process was lost")
        time.sleep(_PAUSE)
    with open(path, encoding="utf-8") as file:
        return from_json(ForkAnswer, file.read())


@contextlib.contextmanager
def _ended(pid: int) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class ForkReplays:
    """Runs the step in children; the first of them tells what can be changed."""

    def __init__(
        self, here: Forks, earlier: Forks | None, incident: Incident, *, steps: int, seconds: float
    ) -> None:
        self._here, self._earlier = here, earlier
        self._incident = incident
        self.steps = 0 if earlier is None else steps
        self._end = time.monotonic() + seconds
        self.step = ForkAnswer()

    @property
    def rows(self) -> int:
        return self.step.rows

    @property
    def values(self) -> int:
        return self.step.values

    @property
    def snapshots(self) -> int:
        return 1 if self.steps else 0

    @property
    def terms(self) -> tuple[str, ...]:
        origin = self._incident.origin
        known = origin.facts.get("term", {}).get("terms", ()) if origin is not None else ()
        return tuple(name for name, _ in known)

    def run(self, change: Change) -> Seen:
        """Run the step in a child with the change."""
        if change.rows is not None and not self.rows:
            raise CannotReplayError("the batch cannot be split")
        forks = self._earlier if change.steps else self._here
        if forks is None:
            raise CannotReplayError("no earlier step was held")
        seconds = self._end - time.monotonic()
        answer = forks.ask(change, until=self.step.clock, seconds=seconds)
        if answer.problem is not None:
            raise CannotReplayError(answer.problem)
        if change == Change() and self.step.clock is None:
            self.step = answer
        return seen_of(answer.incident, change)


def write_diagnosis(
    here: Forks,
    earlier: Forks | None,
    incident: Incident,
    *,
    path: str,
    steps: int,
    seconds: float,
) -> None:
    """Make the experiments, and write the diagnosis that they allow."""
    replays = ForkReplays(here, earlier, incident, steps=steps, seconds=seconds)
    diagnosis = _diagnosis(replays, incident, seconds=seconds)
    replace_file(path, to_json(diagnosis))


def _diagnosis(replays: ForkReplays, incident: Incident, *, seconds: float) -> Diagnosis:
    diagnosis, origin = incident.diagnosis, incident.origin
    assert diagnosis is not None
    assert origin is not None
    lab = Lab(replays, seconds=seconds)
    replays.run(Change())  # so that the step is known
    is_diverging = replays.step.is_diverging
    findings = experiment(lab, diagnosis, origin, steps=replays.steps, is_diverging=is_diverging)
    known = replays.step
    named: list[Finding] = [with_samples(each, known.indices, known.dataset) for each in findings]
    judgement = judged(diagnosis, origin, named, is_diverging=is_diverging)
    return with_reason(judgement, known.why_not)


Copies = list[tuple[Tensor, Tensor]]
Problem = Callable[[], str | None]


class Conditions:
    """What a change asks for, from now to the end of the process; nothing is put back."""

    def __init__(self, guard: Guard, incident: Incident, change: Change) -> None:
        self._guard, self._incident, self._change = guard, incident, change
        self._entered: list[Any] = []  # or they would be left with the last reference
        self._problems: list[Problem] = []
        self._has_delivered = False
        self._dtype: torch.dtype | None = None

    def begin(self, copies: Copies) -> None:
        """Put the process under them; CannotReplayError if that cannot be done."""
        change, guard = self._change, self._guard
        torch.set_num_threads(1)  # threads do not outlive a fork
        with guard.past.tracing.paused():
            if change.snapshot is not None:
                _put_back(copies)
            self._gentler()
        if change.is_compiled:
            if not _compiled():
                raise CannotReplayError("nothing is compiled")
            guard.past.tracing.switch_off()
        if change.precision is not None:
            self._raise_precision(change.precision)
        if change.term is not None:
            self._take_term(change.term)
        if change.is_guarded:
            self._keep_inside()

    def problem(self) -> str | None:
        """Why what was seen says nothing about the change; None if it does."""
        return next((said for ask in self._problems if (said := ask()) is not None), None)

    def batch(self, batch: Any) -> Any:
        """What a loader hands over in place of its batch."""
        change = self._change
        with self._guard.past.tracing.paused():
            if change.rows is not None and not self._has_delivered:
                split = Split(batch)
                batch = split.only(change.rows)
                if change.replaced is not None and change.donor is not None:
                    batch = split.with_values(batch, *change.replaced, change.donor)
            self._has_delivered = True
            return self._lifted(batch)

    def _gentler(self) -> None:
        change, optimizers = self._change, self._guard.evidence.optimizers()
        if change.learning_rate != 1.0:
            for optimizer in optimizers:
                lower_rates(optimizer, schedulers_of(optimizer), change.learning_rate)
        if change.clip is not None:
            self._entered.append(clip_updates(optimizers, max_norm=change.clip))
        if change.loss_scale != 1.0:
            if self._guard.evidence.scaler is None:
                raise CannotReplayError("there is no loss scale")
            multiply_scale(self._guard.evidence.scaler, change.loss_scale)

    def _take_term(self, number: int) -> None:
        if self._guard.evidence.scaler is not None:
            raise CannotReplayError("a term alone would go without its scale")
        context = only_term(number, lambda: self._guard.past.tracing.nodes)
        begun = self._enter(context)
        said = "there is not one backward pass from a sum"
        self._problems.append(lambda: None if len(begun) == 1 else said)

    def _keep_inside(self) -> None:
        diagnosis, origin = self._incident.diagnosis, self._incident.origin
        assert diagnosis is not None
        assert origin is not None
        inside = self._enter(kept_inside(diagnosis.cause, origin))
        said = "the operation could not be guarded"
        self._problems.append(lambda: None if inside.applied else said)

    def _raise_precision(self, precision: str) -> None:
        assert self._incident.origin is not None
        self._dtype = higher_dtype(precision, self._incident.origin)
        self._enter(raised(living(nn.Module), self._dtype))
        register_module_forward_pre_hook(self._lift_inputs)

    def _lift_inputs(self, module: nn.Module, args: Any) -> Any:
        with self._guard.past.tracing.paused():
            return self._lifted(args)

    def _lifted(self, batch: Any) -> Any:
        dtype = self._dtype
        return batch if dtype is None else map_leaves(batch, lambda leaf: _raised(leaf, dtype))

    def _enter(self, context: Any) -> Any:
        self._entered.append(context)
        return context.__enter__()


def copies_of(optimizers: Iterable[Optimizer]) -> Copies:
    """The parameters as they are now."""
    params = (param for optimizer in optimizers for param in params_of(optimizer))
    return [(param, param.detach().clone()) for param in params]


def has_workers() -> bool:
    """Whether a loader is under way whose workers hand each batch over only once."""
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    return bool(living(_MultiProcessingDataLoaderIter))


def _put_back(copies: Copies) -> None:
    with torch.no_grad():
        for param, before in copies:
            param.copy_(before)


def _raised(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    is_lower = leaf.is_floating_point() and leaf.dtype.itemsize < dtype.itemsize
    return leaf.to(dtype) if is_lower else leaf


def _compiled() -> bool:
    # Whoever compiles has imported it, and it takes seconds: it is not imported to ask.
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    modules = living(dynamo.eval_frame.OptimizedModule)
    return bool(modules) or dynamo.utils.counters["frames"]["ok"] > 0
