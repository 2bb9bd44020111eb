"""`stayfinite run --capsule FILE`: made where the script was traced, delivered when it is over."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stayfinite.errors import CapsuleError, ConfigError
from stayfinite.records import Incident, RunResult
from stayfinite.runner import tree
from stayfinite.runner.options import RunOptions
from stayfinite.runner.plan import Plan, launched, ours
from stayfinite.runner.scene import Scene
from stayfinite.runner.seeds import recorded_seeds

if TYPE_CHECKING:
    from stayfinite.capsule import Capsule
    from stayfinite.runner.watch import Watch

_ENDING = ".capsule"
_HEAD = b'"stayfinite":"1","capsule":'


def wish_of(options: RunOptions, cwd: str, *, ranks: int | None = None) -> dict[str, Any] | None:
    """What a plan says of the capsule that is wanted; ConfigError if it cannot be written.

    `ranks` is how many a launcher has started, each with a run of its own.
    """
    if options.capsule is None:
        if options.with_batch or options.no_source:
            raise ConfigError("--with-batch and --no-source are about a capsule; add --capsule.")
        return None
    if (reason := _why_not(options.capsule)) is not None:
        raise ConfigError(reason)
    return {
        "with_batch": options.with_batch,
        "with_source": not options.no_source,
        "cwd": cwd,
        "ranks": ranks,
    }


def _why_not(path: str) -> str | None:
    # Without torch, which the script must be the first to import.
    folder = os.path.dirname(path)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        return f"--capsule {path}: the folder {folder} is not there, or cannot be written."
    if os.path.isdir(path):
        return f"--capsule {path} is a folder; give the path of a file in it."
    if os.path.lexists(path) and not _looks_like_one(path):
        return f"--capsule {path} is there already, and is no capsule; give another name."
    return None


def _looks_like_one(path: str) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return _HEAD in file.read(200)
    return False


def keep_capsule(watch: Watch, incident: Incident) -> None:
    """Write the capsule of a process into the folder of its plan; the first one counts.

    It is the process that knows which files it has imported, traced or not.
    """
    guard, path = watch.guard, _path(watch.plan.folder, watch.pid)
    is_exact = incident.origin is not None and incident.origin.exact
    if guard is None or watch.plan.capsule is None or os.path.exists(path):
        return
    ours.is_writing = True  # asking git is not the script's doing either
    try:
        made = _made(guard if is_exact else None, incident, watch.plan)
    finally:
        ours.is_writing = False
    _write(path, made)


def _made(guard: Any, incident: Incident, plan: Plan) -> Capsule:
    from stayfinite.guard.kept import pass_capsule

    wish, folder, root = plan.capsule or {}, _folder(plan), _root(plan)
    command, ranks = _command(plan.command, folder, root), wish.get("ranks")
    return pass_capsule(
        guard,
        incident,
        root=root,
        folder=_within(folder, root),
        command=command if ranks is None else launched(command, ranks=ranks),
        main=_main_file(plan.command, folder),
        seeds=recorded_seeds(plan.folder),
        with_batch=wish["with_batch"],
        with_source=wish["with_source"],
        config={name: value for name, value in plan.guard.items() if name != "folder"},
    )


def _folder(plan: Plan) -> str:
    """The one that files in the incident are relative to."""
    return os.path.realpath(str(plan.guard.get("folder") or (plan.capsule or {})["cwd"]))


def _root(plan: Plan) -> str:
    """Where the project begins: the working folder if the script is in it."""
    folder, cwd = _folder(plan), os.path.realpath((plan.capsule or {})["cwd"])
    return cwd if f"{folder}{os.sep}".startswith(f"{cwd}{os.sep}") else folder


def _command(words: tuple[str, ...], folder: str, root: str) -> tuple[str, ...]:
    """The words that follow `python`, with the script named from the project."""
    if not words or words[0] == "-m":
        return tuple(_named_within(word, root) for word in words)
    script = next(iter(_main_file(words, folder)), folder)
    return (_within(script, root), *words[1:])


def _named_within(word: str, root: str) -> str:
    """A word of a launcher's command; the script in it is named from the project too."""
    path = os.path.realpath(word)
    is_ours = os.path.isabs(word) and word.endswith(".py") and path.startswith(root + os.sep)
    return _within(path, root) if is_ours else word


def _main_file(words: tuple[str, ...], folder: str) -> tuple[str, ...]:
    """The script, if it is a file of its own."""
    path = os.path.join(folder, os.path.basename(words[0])) if words else folder
    return (path,) if path.endswith(".py") and os.path.isfile(path) else ()


def _within(path: str, root: str) -> str:
    return os.path.relpath(path, root).replace(os.sep, "/")


def deliver(scene: Scene, records: list[tree.ProcessRecord], result: RunResult) -> list[str]:
    """Put the capsule of the first incident where it was asked for; lines that say so."""
    target = scene.options.capsule
    if target is None or not result.incidents:
        return []
    from stayfinite.capsule.making import told
    from stayfinite.capsule.sources import with_files

    first = result.incidents[0]
    found = tree.first_incident(records)
    capsule = _traced(scene.plan.folder, first) or _made(None, first, scene.plan)
    facts = {} if found is None else {"arm_at": found[0].arm_at, "seconds": found[0].seconds}
    capsule = dataclasses.replace(
        with_files(capsule, _root(scene.plan)) if capsule.sources else capsule,
        incident=told(first, with_source=not scene.options.no_source),
        config={**capsule.config, **facts},
    )
    try:
        _write(target, capsule)
    except CapsuleError as error:
        return [str(error)]
    name = shlex.quote(os.path.relpath(target, scene.cwd))
    without = "" if capsule.batch else " (without the batch)"
    return [f"capsule: {name}{without}; to see it go bad elsewhere: stayfinite replay {name}"]


def _traced(folder: str, incident: Incident) -> Capsule | None:
    """The capsule of the run that saw this incident exactly."""
    from stayfinite.capsule import read_capsule

    paths = glob.glob(os.path.join(glob.escape(folder), "**", f"*{_ENDING}"), recursive=True)
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        with contextlib.suppress(CapsuleError):
            capsule = read_capsule(path)
            if _place(capsule.incident) == _place(incident):
                return capsule
    return None


def _place(incident: Incident) -> Any:
    origin = incident.origin
    return None if origin is None else (origin.op, origin.node, origin.line, origin.phase)


def _path(folder: str, pid: int) -> str:
    return os.path.join(folder, f"{pid}{_ENDING}")


def _write(path: str, capsule: Capsule) -> None:
    from stayfinite.capsule import write_capsule

    ours.is_writing = True  # not the script's doing
    try:
        write_capsule(Path(path), capsule)
    finally:
        ours.is_writing = False
