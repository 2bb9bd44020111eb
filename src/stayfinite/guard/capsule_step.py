"""What a guard keeps of its last bad step, so that a capsule can be made of it afterwards."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from stayfinite.capsule.file import Capsule, CodeReference, State
from stayfinite.capsule.make import (
    LARGEST_BATCH,
    Redact,
    batch_of,
    batch_size,
    birth_of,
    copy_of,
    environment,
    incident_for_capsule,
    own_code,
    state_of,
    versions,
)
from stayfinite.checkpoint.modules import Members
from stayfinite.detect.finite import all_finite
from stayfinite.guard.step import members_of
from stayfinite.living import living
from stayfinite.locate.capture import Beginning, Kept
from stayfinite.records import Incident, to_data
from stayfinite.report.store.writer import commit_of
from stayfinite.snapshot import RandomState
from stayfinite.training import params_of

if TYPE_CHECKING:
    from stayfinite.guard.job import Job

Call = tuple[Callable[[Any], Any], Any]


@dataclass(frozen=True, kw_only=True)
class KeptStep:
    """A bad step of ours, as it stood before it began."""

    step: int
    function: Callable[[Any], Any]
    batch: tuple[Any, ...]
    state: State | None
    notes: tuple[str, ...]
    random: dict[str, Any]
    kept: Kept | None
    config: dict[str, Any]

    def capsule(
        self, incident: Incident, *, with_batch: bool, with_source: bool, redact: Redact | None
    ) -> Capsule:
        """All of it that its owner consents to."""
        batch, note = batch_of(self.batch, with_batch=with_batch, redact=redact)
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        main = None if file is None else os.path.realpath(file)  # None in a notebook
        cwd = os.path.realpath(os.getcwd())
        is_here = main is None or main.startswith(cwd + os.sep)
        root = cwd if main is None or is_here else os.path.dirname(main)
        made = Capsule(
            incident=incident,
            code=CodeReference(
                kind="step",
                command=_command(main, root),
                function=getattr(self.function, "__qualname__", None),
            ),
            birth=birth_of(self.kept, with_data=with_batch and redact is None),
            state=self.state,
            batch=batch,
            random=self.random,
            config=self.config,
            notes=(*self.notes, *([note] if note else [])),
        )
        return _completed(made, root, _file_of(self.function), with_source=with_source)


def keep_step(job: Job, calls: list[Call], kept: Kept | None, *, step: int) -> KeptStep:
    """The step that is under way, whose beginning has been put back."""
    state, note = state_of(members_of(job))
    batch: tuple[Any, ...] = tuple(each for _, each in calls)
    size, too_large = batch_size(batch), None
    if size > LARGEST_BATCH:  # what is kept in memory is never large
        batch, most = (), LARGEST_BATCH
        too_large = f"the batch has {size:,} bytes, and is not in it: {most:,} are possible"
    return KeptStep(
        step=step,
        function=calls[0][0],
        batch=tuple(map(copy_of, batch)),
        state=state,
        notes=tuple(each for each in (note, too_large) if each is not None),
        random=dict(vars(RandomState.capture())),
        kept=kept,
        config=to_data(job.config),
    )


def pass_capsule(
    guard: Any,
    incident: Incident,
    *,
    root: str,
    folder: str,
    command: tuple[str, ...],
    main: tuple[str, ...],
    seeds: dict[str, Any],
    with_batch: bool,
    with_source: bool,
    config: dict[str, Any],
) -> Capsule:
    """The pass through a script's modules that went bad under this guard's tracer.

    Without a guard, only what replays the script from its start; `main` is its file.
    """
    tracing = None if guard is None else guard.past.tracing
    kept, beginning = (None, None) if tracing is None else (tracing.kept, tracing.beginning)
    given = () if beginning is None else tuple(args for _, args in beginning.entries)
    batch, batch_note = batch_of(given, with_batch=with_batch, redact=None)
    state, state_note = (None, None) if beginning is None else _state_at(beginning)
    made = Capsule(
        incident=incident,
        code=CodeReference(kind="script", command=command, folder=folder),
        birth=birth_of(kept, with_data=with_batch),
        state=state,
        batch=batch,
        random=None if beginning is None else dict(vars(beginning.random)),
        seeds=seeds,
        config=config,
        notes=tuple(note for note in (batch_note, state_note) if note is not None),
    )
    return _completed(made, root, main, with_source=with_source)


def _completed(made: Capsule, root: str, files: Iterable[str], *, with_source: bool) -> Capsule:
    """The capsule with the code under `root` and of `files`, and what it ran on."""
    code = own_code(root, *files)
    commit, is_dirty = commit_of(Path(root))
    reference = dataclasses.replace(
        made.code, paths=code.paths, digests=code.digests, commit=commit, is_dirty=is_dirty
    )
    return dataclasses.replace(
        made,
        incident=incident_for_capsule(made.incident, with_source=with_source),
        code=reference,
        sources=code.sources if with_source else (),
        versions=versions(),
        environment=environment(),
        notes=(*made.notes, *code.notes),
        made=time.time(),
    )


def _state_at(beginning: Beginning) -> tuple[State | None, str | None]:
    """Models and their optimizers; buffers as they were before the pass."""
    alive = (module() for module, _ in beginning.entries)
    models = tuple({id(module): module for module in alive if module is not None}.values())
    params = {id(param) for model in models for param in model.parameters()}
    if not all_finite(param for model in models for param in model.parameters()):
        return None, "the state before the step is not in it: the weights had gone bad already"
    theirs = tuple(
        o for o in living(Optimizer) if any(id(param) in params for param in params_of(o))
    )
    buffers = [beginning.buffers.get(id(model), {}) for model in models]
    return state_of(Members(models=models, optimizers=theirs), buffers=buffers)


def _file_of(function: Any) -> list[str]:
    try:
        return [inspect.getfile(inspect.unwrap(function))]
    except TypeError:
        return []


def _command(main: str | None, root: str) -> tuple[str, ...]:
    """The words that follow `python`; none where no script runs."""
    if main is None:
        return ()
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return ("-m", spec.name.removesuffix(".__main__"), *sys.argv[1:])
    return (os.path.relpath(main, root).replace(os.sep, "/"), *sys.argv[1:])
