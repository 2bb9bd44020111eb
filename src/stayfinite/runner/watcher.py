"""The watch over one process: its record on disk, and who reports what it sees."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from stayfinite.errors import ConfigError, PackageError, PeerLostError
from stayfinite.records import Aftermath, Forecast, Incident, RunResult
from stayfinite.report.sinks import print_forecast, tell_trackers
from stayfinite.report.sinks import rank_here as rank
from stayfinite.report.store.writer import RunInfo, StoreWriter, new_run_folder, run_info
from stayfinite.runner.capsules import keep_capsule
from stayfinite.runner.imports import after_import
from stayfinite.runner.options import RunOptions
from stayfinite.runner.plan import (
    Effect,
    Plan,
    ProcessRecord,
    attempt_here,
    birth_of_process,
    is_running,
    load_records,
    ours,
    save_record,
    was_stopped,
)
from stayfinite.runner.script import Target, is_ours, read_instead, watch_unraisable
from stayfinite.runner.seeds import Seeds
from stayfinite.runner.side_effects import Audit, Effects, Refusal, note_native_writers, note_stdin
from stayfinite.safely import step_aside

if TYPE_CHECKING:
    from stayfinite.detect.hooks import Attachment
    from stayfinite.guard import Guard
    from stayfinite.guard.discover import ProcessGuard
    from stayfinite.guard.read_values import ValuesRead
    from stayfinite.guard.recorder import Recorder


Listener = Callable[["Watch", Incident], None]


class Reporter(Protocol):
    """Watches training in one process and tells what it sees; the purpose of a plan chooses one."""

    def attach(self) -> Callable[[], None]:
        """Begin, once torch is there; the result ends it."""

    def crashed(self, error: BaseException) -> None:
        """The script died of an error of its own, which may be a NaN's doing."""

    def refused(self, effect: Effect) -> None:
        """The sandbox has not let the script do this."""

    def end(self) -> None:
        """The script is over here; comes once."""

    def after_fork(self) -> bool:
        """Whether this forked process is one of the script's own, with a record of its own."""


class Watch:
    """Watches this process and keeps its record current; `listeners` hear of each incident."""

    def __init__(self, plan: Plan, *, key: str) -> None:
        self.plan, self.key = plan, key
        self.pid = os.getpid()
        self.process_guard: ProcessGuard | None = None  # of the guard; set by the reporter
        self.listeners: list[Listener] = []
        self.on_located: Callable[[Incident], None] | None = None  # before anything is proven
        self.is_muted = False
        self.is_over = False  # the reporter has ended the script
        self._forget()
        self.effects = Effects(keep=(os.getcwd(), plan.script_folder), on_first=self.save)
        self._refused: str | None = None
        self._detach: Callable[[], None] | None = None
        self.seeds = Seeds(folder=plan.folder, repeat=plan.repeat, key=key)
        self._reporter = _reporter_of(self)

    def _forget(self) -> None:
        self.in_group = self.has_ended = self._has_saved = self._has_begun = False
        self.code: int | None = None  # with which this process ends, once that is known
        self.seconds: float | None = None  # until the first incident
        self.rank: int | None = None
        self.aftermath = Aftermath()

    def start(self) -> None:
        """Attach to this process, and to torch as soon as the script imports it."""
        if self.plan.purpose == "preflight":
            watch_unraisable()  # it is our stop that ends it
        else:
            read_instead(self.plan.instead)
            self.seeds.install()
        self._audit()
        after_import("torch", self._attach)

    def _audit(self) -> None:
        """Note what the user's own run changes; a run of ours is kept from changing anything."""
        if self.plan.sandbox == "overlay":
            return  # it changes copies that are thrown away
        if self.plan.sandbox is None:
            audit = Audit(self.effects.note)
            note_stdin(audit)
        else:
            folders = (self.plan.folder, *self.plan.writable)
            audit = Audit(Refusal(folders, on_refused=self._note_refusal).judge)
            if self.plan.sandbox == "audit":
                audit.install_for_libraries()
        audit.install()
        note_native_writers(audit)

    def _note_refusal(self, effect: Effect) -> None:
        if self._refused is None:
            self._refused = effect.words
            with step_aside("noting what was refused"):
                self.save()
        self._reporter.refused(effect)

    def _attach(self, torch: ModuleType) -> None:
        if not self.is_muted:
            self._detach = self._reporter.attach()

    @property
    def guard(self) -> Guard | None:
        """Who watches here now; None before torch is there."""
        return None if self.process_guard is None else self.process_guard.guard

    @property
    def has_stopped(self) -> bool:
        """Whether the script was ended here on purpose."""
        return self.is_over or bool(self.guard and self.guard.stopped)

    def record(self) -> ProcessRecord:
        """What this process has to report now."""
        guard = self.guard
        result = self._result()
        # An incident behind a crash does not end the process; the crash does.
        bad = [i for i in result.incidents if not i.outcome or i.outcome.strategy != "script"]
        is_ended = self.plan.stops and bool(bad) and not (guard and guard.crashed)
        return ProcessRecord(
            pid=self.pid,
            born=birth_of_process(self.pid) or "",
            rank=self.rank or rank(),
            result=result,
            saw_torch=guard is not None,
            stopped=self.has_stopped or is_ended,
            in_group=self.in_group and not self.has_ended,
            arm_at=guard.arm_at() if guard and result.incidents else None,
            seconds=self.seconds,
            effects=tuple(self.effects.noted),
            made=tuple(self.effects.made),
            refused=self._refused,
            folder=self.plan.guard.folder,
            has_begun=self._has_begun or self.in_group,
            ended=self.code if self.has_ended else None,
            attempt=attempt_here(),
            aftermath=self.aftermath,
        )

    def _result(self) -> RunResult:
        guard = self.guard
        if guard is None or self.is_muted:
            return RunResult()
        return RunResult(
            incidents=tuple(map(self.with_rank, guard.incidents)),
            steps=guard.steps,
            skipped_by_scaler=guard.scaler_skips,
            forecasts=tuple(guard.forecasts),
        )

    def with_rank(self, incident: Incident) -> Incident:
        """The incident with the rank of this process, where it has none yet.

        Of ranks that train together it has that of the one where it began, which may be 0.
        """
        if incident.world > 1 or incident.rank or not self.rank:
            return incident
        return dataclasses.replace(incident, rank=self.rank)

    def crashed(self, error: BaseException) -> None:
        """The script died of an error of its own."""
        if not self.is_muted:
            self._reporter.crashed(error)

    def save(self) -> None:
        """Bring the record on disk up to date."""
        if os.path.isdir(self.plan.folder):
            save_record(self.record(), self.plan.folder)
            self._has_saved = True

    def end(self) -> None:
        """Detach, read the last flags, and save if there is anything to tell."""
        if self.has_ended:
            return
        self.has_ended = True
        self._reporter.end()
        with step_aside("saving the record"):
            if self._has_saved or (self.guard is not None and not self.is_muted):
                self.save()

    def begin_training(self) -> None:
        """The first backward pass: from here on this process has something to tell at its end."""
        self._has_begun = True
        if self.pid != self.plan.pid:
            with step_aside("noting that training begins"):
                self.save()

    def join_group(self) -> None:
        """Note that this process trains together with others."""
        self.in_group = True
        with step_aside("noting the process group"):
            self.rank = rank()
            self.save()

    def mute(self) -> None:
        """Report nothing from this process; what it changes is still noted."""
        self.is_muted = True
        if self._detach is not None:
            self._detach()

    def after_fork(self) -> None:
        """Become the watch of a forked child: its own record, nothing of the parent's."""
        if self._reporter.after_fork():
            self.pid = os.getpid()
            self._forget()
            self.effects.clear()
            self.seeds.forget_key()


def _reporter_of(watch: Watch) -> Reporter:
    # Late, so that a run of the script by itself starts sooner.
    if watch.plan.purpose == "preflight":
        from stayfinite.runner.preflight_run import RiskReporter

        return RiskReporter(watch)
    return IncidentReporter(watch)


class IncidentReporter:
    """Tells of bad steps: on disk, in the record of the run, in a capsule, and to listeners."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._recorder: Recorder | None = None
        self._read: ValuesRead | None = None
        self._numbers: Attachment | None = None

    def attach(self) -> Callable[[], None]:
        was_on = gc.isenabled()
        gc.disable()  # what is imported here stays: no need to walk torch's objects for it
        try:
            process_guard = open_process_guard(
                self._watch,
                on_incident=self._tell,
                on_step=self._stepped,
                on_pass=self._passed,
                on_bad_loss=self._trains_on,
                on_located=self._located,
                on_forecast=self._foretell,
            )
        finally:
            if was_on:
                gc.enable()
        self._record()
        if self._watch.plan.repeat is None:  # else nothing is to be replayed: the tracer is on
            self._watch_numbers()
            join_frameworks()
        return process_guard.close

    def _watch_numbers(self) -> None:
        from stayfinite.detect.hooks import watch_numbers
        from stayfinite.guard.read_values import ValuesRead

        watch = self._watch
        self._read = ValuesRead(
            steps=lambda: watch.guard.steps if watch.guard else 0, folder=watch.plan.guard.folder
        )
        self._numbers = watch_numbers(self._read.saw)

    def _record(self) -> None:
        with step_aside("recording the run"):
            self._recorder = recorder_of(self._watch.plan)

    def _stepped(self, optimizer: Any, evidence: Any, *, skipped: bool) -> None:
        if self._recorder is not None:
            self._recorder.stepped(optimizer, evidence, skipped=skipped)

    def _passed(self, evidence: Any) -> None:
        if self._recorder is not None:
            self._recorder.passed(evidence)

    def _trains_on(self, loss: Any) -> None:
        if self._read is not None:
            self._read.trains_on(loss)

    def _located(self, incident: Incident) -> None:
        if self._watch.on_located is not None and not self._watch.is_muted:
            self._watch.on_located(incident)

    def _tell(self, incident: Incident) -> None:
        watch = self._watch
        if watch.is_muted:
            return
        if watch.seconds is None:
            watch.seconds = time.time() - watch.plan.started
        watch.rank = rank()
        incident = watch.with_rank(incident)
        with step_aside("saving the incident"):
            watch.save()
        if self._recorder is not None:
            with step_aside("recording the incident"):
                self._recorder.heard(incident)
        with step_aside("keeping a capsule"):
            keep_capsule(watch, incident)
        if watch.plan.repeat is None:  # a run of ours tells nobody else
            with step_aside("notifying the trackers"):
                tell_trackers(incident)
        for listen in watch.listeners:
            with step_aside("reporting the incident"):
                listen(watch, incident)

    def _foretell(self, forecast: Forecast) -> None:
        watch = self._watch
        if watch.is_muted:
            return
        if self._recorder is not None:
            with step_aside("recording the forecast"):
                self._recorder.on_forecast(forecast)
        if watch.plan.repeat is None:  # a run of ours tells nobody else
            with step_aside("telling the trackers of a forecast"):
                tell_trackers.on_forecast(forecast)
        if forecast.severity != "info":
            with step_aside("reporting the forecast"):
                print_forecast(forecast)

    def crashed(self, error: BaseException) -> None:
        if (guard := self._watch.guard) is not None:
            with step_aside("looking at the script's error"):
                guard.script_crashed(error)

    def refused(self, effect: Effect) -> None:
        """It is noted."""

    def end(self) -> None:
        watch, process_guard = self._watch, self._watch.process_guard
        is_heard = process_guard is not None and not watch.is_muted
        if process_guard is not None and is_heard and watch.plan.repeat is None:
            with step_aside("looking at the end"):
                from torch import nn

                # The modules in the script's own variables; those in functions are gone.
                left = dict(vars(sys.modules["__main__"]))
                process_guard.guard.end(
                    {k: v for k, v in left.items() if issubclass(type(v), nn.Module)}
                )
                read = () if self._read is None else self._read.told()
                watch.aftermath = dataclasses.replace(process_guard.guard.aftermath(), read=read)
        with step_aside("closing the guard"):
            if self._numbers is not None:
                self._numbers.remove()
            if process_guard is not None and is_heard:
                process_guard.close()
                if self._recorder is not None:
                    self._recorder.end(is_finite=not process_guard.guard.incidents)

    def after_fork(self) -> bool:
        if self._read is not None:
            self._read.forget()
        if (guard := self._watch.guard) is not None:
            guard.after_fork()
            self._record()
        return True


def open_process_guard(
    watch: Watch, *, on_incident: Callable[[Incident], None], **told: Any
) -> ProcessGuard:
    """Have a guard, or whoever a framework lends in its place, watch this process.

    `told` are those whom its past tells of more than incidents.
    """
    from stayfinite.guard import Guard
    from stayfinite.guard.discover import ProcessGuard, recover_everything
    from stayfinite.guard.guard import GuardPast

    def attach(guard: Guard) -> None:
        guard.attach(*([recover_everything(guard)] if guard.settings.on_nan == "recover" else ()))

    guard = Guard(watch.plan.guard)
    guard.past = GuardPast(on_incident=on_incident, on_begin=watch.begin_training, **told)
    if watch.plan.guard.forecast:
        from stayfinite.prevent.forecast.forecaster import Forecaster

        guard.past.forecaster = Forecaster()
    if watch.plan.capsule is not None:
        guard.keep_operations()
    watch.process_guard = ProcessGuard(guard, attach)
    return watch.process_guard


GRACE = 1.0  # seconds in which the other ranks may still find out by themselves
PATIENCE = 4.0  # seconds for a stopped rank to unwind before its peers are ended anyway

# Raised where a process waits for one that we ended; by name, since torch may not be there.
_MACHINERY = frozenset(
    [
        "torch.multiprocessing.spawn.ProcessRaisedException",
        "torch.multiprocessing.spawn.ProcessExitedException",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
        "torch.distributed.DistBackendError",
        "torch.distributed.DistNetworkError",
        "concurrent.futures.process.BrokenProcessPool",
    ]
)
_LOST_PEER = ("gloo", "closed by peer", "reset by peer", "Connection closed", "Broken pipe")


def watch_group(watch: Watch) -> None:
    """Note when this process joins a group, and end the waiting of its peers when it stops.

    They are ended when this process has unwound, or soon if it waits for them in doing so.
    """
    watch.listeners.append(lambda watch, incident: end_peers_soon(watch))

    def react(module: ModuleType) -> None:
        theirs = module.init_process_group

        @functools.wraps(theirs)
        def init_process_group(*args: Any, **options: Any) -> Any:
            result = theirs(*args, **options)
            watch.join_group()
            return result

        # The package has the name from this module, and before us if it was imported already.
        for holder in (module, sys.modules.get("torch.distributed")):
            if getattr(holder, "init_process_group", None) is theirs:
                setattr(holder, "init_process_group", init_process_group)  # noqa: B010

    after_import("torch.distributed.distributed_c10d", react)


def is_consequence(error: BaseException, watch: Watch) -> bool:
    """Whether the error is our own stop, or a process noticing that we stopped another."""
    if is_ours(error):
        return True
    kind = type(error)
    lost = watch.in_group and isinstance(error, RuntimeError)
    lost = lost and any(words in str(error) for words in _LOST_PEER)
    lost = lost or isinstance(error, PeerLostError)
    if f"{kind.__module__}.{kind.__qualname__}" not in _MACHINERY and not lost:
        return False
    return was_stopped(load_records(watch.plan.folder))


def end_peers(watch: Watch) -> None:
    """End the peers that still wait for this process, if it was stopped."""
    if not (_may_end_peers(watch) and watch.has_stopped):
        return
    # A handler of the script's own cannot run while the process waits in a collective: SIGKILL.
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, PATIENCE)):
        deadline = time.monotonic() + seconds
        while (waiting := _waiting_peers(watch)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in waiting:
            with contextlib.suppress(OSError):
                os.kill(pid, number)


def end_peers_soon(watch: Watch) -> None:
    """End the peers after a while, for the case that this process waits for them."""
    if _may_end_peers(watch):
        timer = threading.Timer(PATIENCE, end_peers, args=(watch,))
        timer.daemon = True
        timer.start()


def _may_end_peers(watch: Watch) -> bool:
    return watch.in_group and watch.plan.stops and watch.plan.ends_peers


def _waiting_peers(watch: Watch) -> list[int]:
    # The process that reports for all is spared: it hears of the loss from the group itself.
    spared = {watch.pid, watch.plan.pid}
    records = load_records(watch.plan.folder)
    peers = (r for r in records if r.in_group and not r.stopped and r.pid not in spared)
    return [r.pid for r in peers if is_running(r)]


_MEETING = "run-dir"
_PATIENCE = 2.0


def run_folder(
    options: RunOptions, target: Target, *, started: float, meet: str | None
) -> str | None:
    """The folder of this run; the ranks of one launcher `meet` in a folder to agree on it."""
    if options.no_record:
        return None
    folder = options.run_dir
    if folder is None:
        chosen = str(new_run_folder(target.name, started=started))
        return chosen if meet is None else _agree(chosen, os.path.join(meet, _MEETING))
    if meet is None:
        from pathlib import Path

        from stayfinite.report.store.reading import is_run  # late: it reads whole runs

        if is_run(Path(folder)):
            raise ConfigError(f"--run-dir {folder} has a run in it already; give it another name.")
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise ConfigError(f"--run-dir {folder} is a file; it must be a folder, or new.")
    return folder


def _agree(chosen: str, path: str) -> str:
    """The choice of the first rank that comes here; it is in the file, with a line end."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            with open(path, encoding="utf-8") as written:
                text = written.read()
            if text.endswith("\n"):
                return text[:-1] or chosen
            time.sleep(0.01)
        return chosen
    os.write(file, chosen.encode() + b"\n")
    os.close(file)
    return chosen


def recorder_of(plan: Plan) -> Recorder | None:
    """A recorder for this process; None where nothing is recorded."""
    if plan.run_dir is None:
        return None
    from stayfinite.guard.recorder import Recorder

    folder = plan.run_dir
    # What its thread writes is not the script's doing.
    in_thread = functools.partial(setattr, ours, "is_writing", True)
    return Recorder(lambda: StoreWriter(folder, lambda: _info(plan), in_thread=in_thread))


def _info(plan: Plan) -> RunInfo:
    import torch

    from stayfinite import distributed

    # The script's path; of a module (`-m`) its name.
    is_module = plan.command[:1] == ("-m",)
    script = next(iter(plan.command[is_module:]), "")
    if not is_module and script.endswith(".py"):
        script = os.path.join(plan.script_folder, os.path.basename(script))
    return run_info(
        started=plan.started,
        script=script,
        command=plan.command,
        rank=rank(),
        world=distributed.world_size(),
        seed=torch.initial_seed(),
        config=plan.config,
    )


# What a script imports, and the integration that knows it.
_FRAMEWORKS = {
    "lightning.pytorch": "stayfinite.integrations.lightning_guard",
    "pytorch_lightning": "stayfinite.integrations.lightning_guard",
    "transformers.trainer": "stayfinite.integrations.transformers",
}


def join_frameworks() -> None:
    """Have the trainers of each framework join the watch, as soon as the script imports it."""

    def join(framework: ModuleType) -> None:
        # Too old for its integration, it is watched all the same.
        with contextlib.suppress(PackageError):
            importlib.import_module(_FRAMEWORKS[framework.__name__]).join_trainers()

    for name in _FRAMEWORKS:
        after_import(name, join)
