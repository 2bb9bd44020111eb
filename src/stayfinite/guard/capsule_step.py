"""What a guard keeps of its last bad step, so that a capsule can be made of it afterwards."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from stayfinite.capsule import limits
from stayfinite.capsule.contents import Capsule, CodeReference, State
from stayfinite.capsule.make import (
    Redact,
    batch_of,
    batch_size,
    birth_of,
    copied,
    environment,
    own_code,
    state_of,
    told,
    versions,
)
from stayfinite.checkpoint.modules import Members
from stayfinite.detect.finite import all_finite
from stayfinite.guard.step import members_of
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
        main = _main_file()
        cwd = os.path.realpath(os.getcwd())
        is_here = main is None or main.startswith(cwd + os.sep)
        root = cwd if main is None or is_here else os.path.dirname(main)
        code = own_code(root, *_file_of(self.function))
        notes = (*self.notes, *code.notes, *([note] if note else []))
        commit, is_dirty = commit_of(Path(root))
        return Capsule(
            incident=told(incident, with_source=with_source),
            code=CodeReference(
                kind="step",
                command=_command(main, root),
                paths=code.paths,
                function=getattr(self.function, "__qualname__", None),
                commit=commit,
                is_dirty=is_dirty,
                digests=code.digests,
            ),
            sources=code.sources if with_source else (),
            birth=birth_of(self.kept, with_data=with_batch and redact is None),
            state=self.state,
            batch=batch,
            random=self.random,
            versions=versions(),
            environment=environment(),
            config=self.config,
            notes=notes,
            made=time.time(),
        )


def keep_step(job: Job, calls: list[Call], kept: Kept | None, *, step: int) -> KeptStep:
    """The step that is under way, whose beginning has been put back."""
    state, note = state_of(members_of(job))
    batch, too_large = _copied_batch(tuple(batch for _, batch in calls))
    return KeptStep(
        step=step,
        function=calls[0][0],
        batch=batch,
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
    batch, batch_note = _entered(beginning, with_batch=with_batch)
    state, state_note = (None, None) if beginning is None else _state_at(beginning)
    code = own_code(root, *main)
    commit, is_dirty = commit_of(Path(root))
    return Capsule(
        incident=told(incident, with_source=with_source),
        code=CodeReference(
            kind="script",
            command=command,
            folder=folder,
            paths=code.paths,
            commit=commit,
            is_dirty=is_dirty,
            digests=code.digests,
        ),
        sources=code.sources if with_source else (),
        birth=birth_of(kept, with_data=with_batch),
        state=state,
        batch=batch,
        random=None if beginning is None else dict(vars(beginning.random)),
        seeds=seeds,
        versions=versions(),
        environment=environment(),
        config=config,
        notes=tuple(note for note in (batch_note, state_note, *code.notes) if note is not None),
        made=time.time(),
    )


def _entered(
    beginning: Beginning | None, *, with_batch: bool
) -> tuple[tuple[Any, ...], str | None]:
    given = () if beginning is None else tuple(args for _, args in beginning.entries)
    return batch_of(given, with_batch=with_batch, redact=None)


def _state_at(beginning: Beginning) -> tuple[State | None, str | None]:
    """Models and their optimizers; buffers as they were before the pass."""
    alive = (module() for module, _ in beginning.entries)
    models = tuple({id(module): module for module in alive if module is not None}.values())
    params = {id(param) for model in models for param in model.parameters()}
    if not all_finite(param for model in models for param in model.parameters()):
        return None, "the state before the step is not in it: the weights had gone bad already"
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
    theirs = tuple(o for o in found if any(id(param) in params for param in params_of(o)))
    buffers = [beginning.buffers.get(id(model), {}) for model in models]
    return state_of(Members(models=models, optimizers=theirs), buffers=buffers)


def _copied_batch(batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], str | None]:
    """The batch, or nothing and a note: what is kept in memory is never large."""
    size = batch_size(batch)
    if size > limits.BATCH:
        return (), f"the batch has {size:,} bytes, and is not in it: {limits.BATCH:,} are possible"
    return tuple(copied(each) for each in batch), None


def _file_of(function: Any) -> list[str]:
    try:
        return [inspect.getfile(inspect.unwrap(function))]
    except TypeError:
        return []


def _main_file() -> str | None:
    """The script that runs; None in a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None else os.path.realpath(file)


def _command(main: str | None, root: str) -> tuple[str, ...]:
    """The words that follow `python`; none where no script runs."""
    if main is None:
        return ()
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return ("-m", spec.name.removesuffix(".__main__"), *sys.argv[1:])
    return (os.path.relpath(main, root).replace(os.sep, "/"), *sys.argv[1:])
