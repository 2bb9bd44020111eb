"""The watch over one process, of each kind: a guard, and its record on disk."""

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
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from stayfinite.errors import ConfigError, PackageError
from stayfinite.records import Aftermath, Incident, RunResult, from_data
from stayfinite.report.store.writer import RunInfo, StoreWriter, new_run_folder, run_info
from stayfinite.runner.capsules import keep_capsule
from stayfinite.runner.imports import after_import
from stayfinite.runner.options import RunOptions
from stayfinite.runner.plan import (
    MAIN,
    Effect,
    Plan,
    ProcessRecord,
    birth_of_process,
    is_running,
    load_records,
    ours,
    save_record,
)
from stayfinite.runner.script import Target, is_ours, read_instead
from stayfinite.runner.seeds import Seeds
from stayfinite.runner.side_effects import Audit, Effects, Refusal, note_native_writers, note_stdin
from stayfinite.safely import step_aside

if TYPE_CHECKING:
    from torch import nn

    from stayfinite.detect.hooks import Attachment
    from stayfinite.guard import Guard
    from stayfinite.guard.discover import Post
    from stayfinite.guard.read_values import ValuesRead
    from stayfinite.guard.recorder import Recorder


Listener = Callable[["Watch", Incident], None]


class Watch:
    """Watches this process and keeps its record current; `listeners` hear of each incident."""

    def __init__(self, plan: Plan, *, key: str) -> None:
        self.plan, self.key = plan, key
        self.pid = os.getpid()
        self._post: Post | None = None
        self.recorder: Recorder | None = None
        self.listeners: list[Listener] = []
        self.in_group = False
        self.is_muted = False
        self._seconds: float | None = None
        self._rank: int | None = None
        self._has_saved = self._has_ended = self._has_begun = False
        self.code: int | None = None  # with which this process ends, once that is known
        self._read: ValuesRead | None = None
        self._numbers: Attachment | None = None
        self._aftermath = Aftermath()
        keep = (os.getcwd(), str(plan.guard.get("folder") or os.getcwd()))
        self.effects = Effects(keep=keep, on_first=self.save)
        self._refused: str | None = None
        self.seeds = Seeds(folder=plan.folder, repeat=plan.repeat, key=key)

    def start(self) -> None:
        """Attach to this process, and to torch as soon as the script imports it."""
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
            audit = Audit(Refusal(folders, on_refused=self._was_refused).judge)
            if self.plan.sandbox == "audit":
                audit.install_for_libraries()
        audit.install()
        note_native_writers(audit)

    def _was_refused(self, effect: Effect) -> None:
        if self._refused is None:
            self._refused = effect.words
            with step_aside("noting what was refused"):
                self.save()

    @property
    def guard(self) -> Guard | None:
        """Who watches here now; None before torch is there."""
        return None if self._post is None else self._post.guard

    @property
    def has_stopped(self) -> bool:
        """Whether the guard ended the script here on purpose."""
        return bool(self.guard and self.guard.stopped)

    def record(self) -> ProcessRecord:
        """What this process has to report now."""
        guard = self.guard
        result = self._result()
        return ProcessRecord(
            pid=self.pid,
            born=birth_of_process(self.pid) or "",
            rank=self._rank or 0,
            result=result,
            saw_torch=guard is not None,
            stopped=self.has_stopped or (self.plan.stops and self._is_ended_by(result)),
            in_group=self.in_group and not self._has_ended,
            arm_at=guard.arm_at() if guard and result.incidents else None,
            seconds=self._seconds,
            effects=tuple(self.effects.noted),
            made=tuple(self.effects.made),
            refused=self._refused,
            folder=self.plan.guard.get("folder"),
            has_begun=self._has_begun or self.in_group,
            ended=self.code if self._has_ended else None,
            aftermath=self._aftermath,
        )

    def _is_ended_by(self, result: RunResult) -> bool:
        """Whether an incident of ours ends this process; one behind a crash does not."""
        return bool(result.incidents) and not (self.guard and self.guard.crashed)

    def _result(self) -> RunResult:
        guard = self.guard
        if guard is None or self.is_muted:
            return RunResult()
        return RunResult(
            incidents=tuple(self._with_rank(incident) for incident in guard.incidents),
            steps=guard.steps,
            skipped_by_scaler=guard.scaler_skips,
        )

    def crashed(self, error: BaseException) -> None:
        """The script died of an error of its own, which may be a NaN's doing."""
        if self.guard is not None and not self.is_muted:
            with step_aside("looking at the script's error"):
                self.guard.script_crashed(error)

    def save(self) -> None:
        """Bring the record on disk up to date."""
        if os.path.isdir(self.plan.folder):
            save_record(self.record(), self.plan.folder)
            self._has_saved = True

    def end(self) -> None:
        """Detach, read the last flags, and save if there is anything to tell."""
        if self._has_ended:
            return
        self._has_ended = True
        with step_aside("looking at the end"):
            self._look_at_the_end()
        with step_aside("closing the guard"):
            if self._numbers is not None:
                self._numbers.remove()
            if self._post is not None and not self.is_muted:
                self._post.close()
                if self.recorder is not None:
                    self.recorder.end(is_finite=not self._post.guard.incidents)
            if self._has_saved or (self.guard is not None and not self.is_muted):
                self.save()

    def _look_at_the_end(self) -> None:
        guard = self.guard
        if guard is None or self.is_muted or self.plan.repeat is not None:
            return
        guard.end(_modules_left())
        read = () if self._read is None else self._read.told()
        self._aftermath = dataclasses.replace(guard.aftermath(), read=read)

    def _begin_training(self) -> None:
        """The first backward pass: from here on this process has something to tell at its end."""
        self._has_begun = True
        if self.pid != self.plan.pid:
            with step_aside("noting that training begins"):
                self.save()

    def join_group(self) -> None:
        """Note that this process trains together with others."""
        self.in_group = True
        with step_aside("noting the process group"):
            self._rank = rank()
            self.save()

    def mute(self) -> None:
        """Report nothing from this process; what it changes is still noted."""
        self.is_muted = True
        if self._post is not None:
            self._post.close()

    def after_fork(self) -> None:
        """Become the watch of a forked child: its own record, nothing of the parent's."""
        self.pid = os.getpid()
        self._seconds, self._rank = None, None
        self._has_saved = self._has_ended = self._has_begun = self.in_group = False
        self.code, self._aftermath = None, Aftermath()
        if self._read is not None:
            self._read.forget()
        self.effects.clear()
        self.seeds.forget_key()
        if self.guard is not None:
            self.guard.after_fork()
            self._begin_record()

    def _attach(self, torch: ModuleType) -> None:
        if self.is_muted:
            return
        with _no_collection():
            guard = self._new_guard()
            from stayfinite.guard.discover import Post

        if self.plan.capsule is not None:
            guard.keep_operations()
        self._post = Post(guard, _attach_guard)
        self._begin_record()
        if self.plan.repeat is None:  # else nothing is to be replayed: the tracer is on
            self._watch_numbers()
            join_frameworks()

    def _watch_numbers(self) -> None:
        from stayfinite.detect.hooks import watch_numbers
        from stayfinite.guard.read_values import ValuesRead

        folder = self.plan.guard.get("folder")
        self._read = ValuesRead(steps=lambda: self.guard.steps if self.guard else 0, folder=folder)
        self._numbers = watch_numbers(self._read.saw)

    def _new_guard(self) -> Guard:
        from stayfinite.guard import Guard, GuardSettings
        from stayfinite.guard.guard import GuardPast

        guard = Guard(from_data(GuardSettings, self.plan.guard))
        guard.past = GuardPast(
            on_incident=self._heard,
            on_step=self._stepped,
            on_begin=self._begin_training,
            on_bad_loss=self._trains_on,
        )
        return guard

    def _trains_on(self, loss: Any) -> None:
        if self._read is not None:
            self._read.trains_on(loss)

    def _begin_record(self) -> None:
        with step_aside("recording the run"):
            self.recorder = recorder_of(self.plan)

    def _stepped(self, optimizer: Any, evidence: Any, *, skipped: bool) -> None:
        if self.recorder is not None:
            self.recorder.stepped(optimizer, evidence, skipped=skipped)

    def _heard(self, incident: Incident) -> None:
        if self.is_muted:
            return
        if self._seconds is None:
            self._seconds = time.time() - self.plan.started
        self._rank = rank()
        with step_aside("saving the incident"):
            self.save()
        if self.recorder is not None:
            with step_aside("recording the incident"):
                self.recorder.heard(self._with_rank(incident))
        with step_aside("keeping a capsule"):
            keep_capsule(self, self._with_rank(incident))
        for listen in self.listeners:
            with step_aside("telling of the incident"):
                listen(self, self._with_rank(incident))

    def _with_rank(self, incident: Incident) -> Incident:
        if incident.rank or not self._rank:
            return incident
        return dataclasses.replace(incident, rank=self._rank)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What is imported here stays: torch's objects need not be walked once more for it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _attach_guard(guard: Guard) -> None:
    from stayfinite.guard.discover import recover_everything

    guard.attach(*([recover_everything(guard)] if guard.settings.on_nan == "recover" else ()))


def _modules_left() -> dict[str, nn.Module]:
    """The modules in the script's own variables, by name; those in functions are gone."""
    from torch import nn

    left = dict(vars(sys.modules["__main__"]))
    return {name: value for name, value in left.items() if issubclass(type(value), nn.Module)}


def rank() -> int:
    """This process's rank: torch's if it is in a group, else the launcher's, else 0."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    value = os.environ.get("RANK", "")
    return int(value) if value.isdigit() else 0


PREFLIGHT = "preflight"


def watch_for(plan: Plan, *, key: str) -> Watch:
    """The watch of a process that belongs to this plan."""
    if plan.guard.get("purpose") == PREFLIGHT:
        from stayfinite.runner.preflight_run import RehearsalWatch  # late: other runs start sooner

        return RehearsalWatch(plan, key=key)
    if plan.lab is not None and key == MAIN:
        from stayfinite.runner.prove import LabWatch

        return LabWatch(plan, key=key)
    return Watch(plan, key=key)


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
    watch.listeners.append(_end_peers_soon)

    def react(module: ModuleType) -> None:
        theirs = module.init_process_group

        @functools.wraps(theirs)
        def init_process_group(*args: Any, **options: Any) -> Any:
            result = theirs(*args, **options)
            watch.join_group()
            return result

        module.init_process_group = init_process_group  # type: ignore[attr-defined]

    after_import("torch.distributed.distributed_c10d", react)


def is_consequence(error: BaseException, watch: Watch) -> bool:
    """Whether the error is our own stop, or a process noticing that we stopped another."""
    if is_ours(error):
        return True
    kind = type(error)
    lost = watch.in_group and isinstance(error, RuntimeError)
    if f"{kind.__module__}.{kind.__qualname__}" not in _MACHINERY and not (
        lost and any(words in str(error) for words in _LOST_PEER)
    ):
        return False
    return any(record.stopped for record in load_records(watch.plan.folder))


def end_peers(watch: Watch) -> None:
    """End the peers that still wait for this process, if it was stopped."""
    if not (_may_end_peers(watch) and watch.has_stopped):
        return
    _send(signal.SIGTERM, _waiting_after(GRACE, watch))
    # A handler of the script's own cannot run while the process waits in a collective.
    _send(signal.SIGKILL, _waiting_after(PATIENCE, watch))


def _end_peers_soon(watch: Watch, incident: Incident) -> None:
    end_peers_soon(watch)


def end_peers_soon(watch: Watch) -> None:
    """End the peers after a while, for the case that this process waits for them."""
    if _may_end_peers(watch):
        timer = threading.Timer(PATIENCE, end_peers, args=(watch,))
        timer.daemon = True
        timer.start()


def _may_end_peers(watch: Watch) -> bool:
    return watch.in_group and watch.plan.stops and watch.plan.ends_peers


def _waiting_after(seconds: float, watch: Watch) -> list[int]:
    deadline = time.monotonic() + seconds
    while (waiting := _waiting(watch)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return waiting


def _waiting(watch: Watch) -> list[int]:
    # The process that reports for all is spared: it hears of the loss from the group itself.
    spared = {watch.pid, watch.plan.pid}
    records = load_records(watch.plan.folder)
    peers = (r for r in records if r.in_group and not r.stopped and r.pid not in spared)
    return [r.pid for r in peers if is_running(r)]


def _send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


_MEETING = "run-dir"
_PATIENCE = 2.0


def run_folder(
    options: RunOptions, target: Target, *, started: float, meet: str | None
) -> str | None:
    """The folder of this run; the ranks of one launcher `meet` in a folder to agree on it."""
    if options.no_record:
        return None
    if options.run_dir is not None:
        if meet is None:
            _check_new(options.run_dir)
        return options.run_dir
    chosen = str(new_run_folder(target.name, started=started))
    return chosen if meet is None else _agreed(chosen, meet)


def _check_new(folder: str) -> None:
    from pathlib import Path

    from stayfinite.report.store.reading import is_run  # late: it reads whole runs

    if is_run(Path(folder)):
        raise ConfigError(f"--run-dir {folder} has a run in it already; give it another name.")
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise ConfigError(f"--run-dir {folder} is a file; it must be a folder, or new.")


def _agreed(chosen: str, meet: str) -> str:
    """The choice of the first rank that comes here."""
    path = os.path.join(meet, _MEETING)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(path) or chosen
    os.write(file, chosen.encode() + b"\n")
    os.close(file)
    return chosen


def _read(path: str) -> str | None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if text.endswith("\n"):
            return text[:-1]
        time.sleep(0.01)
    return None


def recorder_of(plan: Plan) -> Recorder | None:
    """A recorder for this process; None where nothing is recorded."""
    if plan.run_dir is None:
        return None
    from stayfinite.guard.recorder import Recorder

    folder = plan.run_dir
    return Recorder(lambda: StoreWriter(folder, lambda: _info(plan), in_thread=_is_ours))


def _is_ours() -> None:
    ours.is_writing = True  # what this thread writes is not the script's doing


def _info(plan: Plan) -> RunInfo:

    torch: Any = sys.modules["torch"]
    distributed: Any = sys.modules.get("torch.distributed")
    is_group = distributed and distributed.is_available() and distributed.is_initialized()
    return run_info(
        started=plan.started,
        script=_script(plan),
        command=plan.command,
        rank=rank(),
        world=distributed.get_world_size() if is_group else 1,
        seed=torch.initial_seed(),
        config=dict(plan.guard),
    )


def _script(plan: Plan) -> str:
    """The script's path; of a module (`-m`) its name."""
    is_module = plan.command[:1] == ("-m",)
    name = next(iter(plan.command[is_module:]), "")
    if is_module or not name.endswith(".py"):
        return name
    return os.path.join(str(plan.guard.get("folder")), os.path.basename(name))


# What a script imports, and the integration that knows it.
_FRAMEWORKS = {
    "lightning.pytorch": "stayfinite.integrations.lightning_guard",
    "pytorch_lightning": "stayfinite.integrations.lightning_guard",
    "transformers.trainer": "stayfinite.integrations.transformers",
}


def join_frameworks() -> None:
    """Have the trainers of each framework join the watch, as soon as the script imports it."""
    for name in _FRAMEWORKS:
        after_import(name, _join)


def _join(framework: ModuleType) -> None:
    try:
        importlib.import_module(_FRAMEWORKS[framework.__name__]).join_trainers()
    except PackageError:  # too old for its integration; the script is watched all the same
        return
