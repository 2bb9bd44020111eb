"""Capsules of scripts: made where a script was traced, and run again in a folder of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stayfinite.errors import CapsuleError, ConfigError, SandboxError
from stayfinite.records import Incident, from_json, to_json
from stayfinite.runner.case import (
    GRACE,
    TRACE_ALL,
    Case,
    OtherRun,
    is_exact,
    last_lines,
    run_child,
    sign_of_life,
)
from stayfinite.runner.options import RunOptions, Scene
from stayfinite.runner.plan import (
    CapsuleWish,
    Plan,
    first_incident,
    load_records,
    our_own_writes,
    write_atomically,
)
from stayfinite.runner.sandbox import allowed_kinds
from stayfinite.runner.script import Target, execute
from stayfinite.runner.seeds import recorded_seeds, write_seeds
from stayfinite.settings import GuardSettings

if TYPE_CHECKING:
    from stayfinite.capsule import Capsule
    from stayfinite.runner.watcher import Watch


_ENDING = ".capsule"
_HEAD = b'"stayfinite":"1","capsule":'


def wish_of(options: RunOptions, cwd: str, *, ranks: int | None = None) -> CapsuleWish | None:
    """What a plan says of the capsule that is wanted; ConfigError if it cannot be written.

    `ranks` is how many a launcher has started, each with a run of its own.
    """
    path = options.capsule
    if path is None:
        if options.with_batch or options.no_source:
            raise ConfigError("--with-batch and --no-source are about a capsule; add --capsule.")
        return None
    folder = os.path.dirname(path)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"--capsule {path}: the folder {folder} is not there, or cannot be written."
        )
    if os.path.isdir(path):
        raise ConfigError(f"--capsule {path} is a folder; give the path of a file in it.")
    if os.path.lexists(path) and not _is_capsule(path):
        raise ConfigError(
            f"--capsule {path} already exists and is not a capsule; give another name."
        )
    with_source = not options.no_source
    return CapsuleWish(with_batch=options.with_batch, with_source=with_source, cwd=cwd, ranks=ranks)


def _is_capsule(path: str) -> bool:
    # Without torch, which the script must be the first to import.
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return _HEAD in file.read(200)
    return False


def keep_capsule(watch: Watch, incident: Incident) -> None:
    """Write the capsule of a process into the folder of its plan; the first one counts.

    It is the process that knows which files it has imported, traced or not.
    """
    wish, path = watch.plan.capsule, os.path.join(watch.plan.folder, f"{watch.pid}{_ENDING}")
    if watch.guard is not None and wish is not None and not os.path.exists(path):
        guard = watch.guard if is_exact(incident) else None
        with our_own_writes():  # asking git is not the script's doing either
            _write(path, _made(guard, incident, watch.plan, wish))


def _made(guard: Any, incident: Incident, plan: Plan, wish: CapsuleWish) -> Capsule:
    from stayfinite.guard.capsule_step import pass_capsule

    folder, root = _project(plan, wish)
    words = plan.command
    main = os.path.join(folder, os.path.basename(words[0])) if words else folder
    is_file = main.endswith(".py") and os.path.isfile(main)
    if not words or words[0] == "-m":
        command = tuple(_named_within(word, root) for word in words)
    else:
        command = (_within(main if is_file else folder, root), *words[1:])
    if wish.ranks is not None:
        alone = ("--standalone", "--nproc-per-node", str(wish.ranks))
        command = ("-m", "torch.distributed.run", *alone, *command)
    return pass_capsule(
        guard,
        incident,
        root=root,
        folder=_within(folder, root),
        command=command,
        main=(main,) if is_file else (),
        seeds=recorded_seeds(plan.folder),
        with_batch=wish.with_batch,
        with_source=wish.with_source,
        config={name: value for name, value in plan.config.items() if name != "folder"},
    )


def _project(plan: Plan, wish: CapsuleWish) -> tuple[str, str]:
    """The folder of the script, and where its project begins: the working folder around it."""
    folder, cwd = os.path.realpath(plan.guard.folder or wish.cwd), os.path.realpath(wish.cwd)
    return folder, cwd if f"{folder}{os.sep}".startswith(f"{cwd}{os.sep}") else folder


def _named_within(word: str, root: str) -> str:
    """A word of a launcher's command; the script in it is named from the project too."""
    path = os.path.realpath(word)
    is_ours = os.path.isabs(word) and word.endswith(".py") and path.startswith(root + os.sep)
    return _within(path, root) if is_ours else word


def _within(path: str, root: str) -> str:
    return os.path.relpath(path, root).replace(os.sep, "/")


def deliver(case: Case) -> Case:
    """Put the capsule of the first incident where it was asked for; a note says so."""
    scene, incidents = case.scene, case.result.incidents
    target, wish = scene.options.capsule, scene.plan.capsule
    if target is None or wish is None or not incidents:
        return case
    from stayfinite.capsule.make import incident_for_capsule, with_files

    capsule = _traced(scene.plan.folder, incidents[0])
    capsule = capsule or _made(None, incidents[0], scene.plan, wish)
    record = case.first and case.first[0]
    facts = {"arm_at": record.arm_at, "seconds": record.seconds} if record else {}
    capsule = dataclasses.replace(
        with_files(capsule, _project(scene.plan, wish)[1]) if capsule.sources else capsule,
        incident=incident_for_capsule(incidents[0], with_source=wish.with_source),
        config={**capsule.config, **facts},
    )
    try:
        _write(target, capsule)
    except CapsuleError as error:
        return case.with_notes(str(error))
    name = shlex.quote(os.path.relpath(target, scene.cwd))
    without = "" if capsule.batch else " (without the batch)"
    return case.with_notes(
        f"capsule: {name}{without}; to see it go bad elsewhere: stayfinite replay {name}"
    )


def _traced(folder: str, incident: Incident) -> Capsule | None:
    """The capsule of the run that saw this incident exactly; of ranks, that where it began."""
    from stayfinite.capsule import read_capsule

    def place(incident: Incident) -> Any:
        origin = incident.origin
        return None if origin is None else (origin.op, origin.node, origin.line, origin.phase)

    paths = glob.glob(os.path.join(glob.escape(folder), "**", f"*{_ENDING}"), recursive=True)
    found = []
    for path in sorted(paths, key=os.path.getmtime, reverse=True):
        with contextlib.suppress(CapsuleError):
            capsule = read_capsule(path)
            if place(capsule.incident) == place(incident):
                found.append(capsule)
    return next((each for each in found if each.birth is not None), found[0] if found else None)


def _write(path: str, capsule: Capsule) -> None:
    from stayfinite.capsule import write_capsule

    with our_own_writes():
        write_capsule(Path(path), capsule)


ORDER = "STAYFINITE_CAPSULE"
_RESULT = "replayed.json"


def replay(capsule: Capsule, path: Path, *, seconds: float) -> OtherRun:
    """Run the script of the capsule, which must be trusted; it is ended after so many seconds."""
    is_step = capsule.code.kind == "step"
    if not capsule.sources or not capsule.code.command:
        raise CapsuleError(f"{path} has no source files to run; give the model with --model.")
    if is_step and (not capsule.batch or capsule.state is None):
        raise CapsuleError(
            f"{path} was made without its batch or state, so its step cannot be run again. Make "
            "it again with with_batch=True."
        )
    with tempfile.TemporaryDirectory(prefix="stayfinite-replay-") as name:
        scene = _scene(capsule, Path(name).resolve(), path)
        try:
            with sign_of_life("running the script of the capsule, traced"):
                code = run_child(scene, scene.plan, seconds=seconds, grace=GRACE)
        except SandboxError as error:
            raise CapsuleError(f"{path} was not replayed: {error}") from None
        if is_step:
            incident, is_told = _told(scene.plan)
        else:
            found = first_incident(load_records(scene.plan.folder))
            incident, is_told = (found[1] if found else None), found is not None or code == 0
        if is_told:
            return OtherRun(incident=incident)
        how = f"ended with exit code {code}" if code is not None and code >= 0 else "was ended"
        return OtherRun(
            problem=f"the script {how} before it got there:", tail=last_lines(scene.plan)
        )


def _scene(capsule: Capsule, folder: Path, path: Path) -> Scene:
    from stayfinite.capsule.file import unpack
    from stayfinite.capsule.make import usable

    unpacked = unpack(capsule, folder)
    for name in ("plan", "seeds"):
        (folder / name).mkdir()
    write_seeds(str(folder / "seeds"), capsule.seeds)
    plan = Plan(
        folder=str(folder / "plan"),
        purpose="second",
        guard=_settings(capsule.config, folder=str(unpacked.project / capsule.code.folder)),
        repeat=str(folder / "seeds"),
        sandboxes=allowed_kinds(),
        writable=(str(folder),),
    )
    paths = [*map(str, unpacked.paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **usable(capsule.environment)}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if capsule.code.kind == "step":
        environment[ORDER] = str(path.resolve())
    return Scene(
        target=Target.of(capsule.code.command),
        options=RunOptions(no_record=True),
        plan=plan,
        cwd=str(unpacked.project),
        environment=environment,
    )


def _settings(config: dict[str, Any], *, folder: str) -> GuardSettings:
    """Traced from the start where that is cheap, as the second run was."""
    seconds, arm_at, skips = (config.get(k) for k in ("seconds", "arm_at", "max_scaler_skips"))
    usual = GuardSettings(
        trace="start",
        folder=folder,
        max_scaler_skips=skips if type(skips) is int and skips > 0 else 20,
    )
    if isinstance(seconds, float) and seconds >= TRACE_ALL and isinstance(arm_at, int):
        return dataclasses.replace(usual, trace="armed", arm_at=arm_at)
    return usual


def _told(plan: Plan) -> tuple[Incident | None, bool]:
    try:
        with open(os.path.join(plan.folder, _RESULT), encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return None, False
    return (from_json(Incident, text) if text != "null" else None), True


def run_ordered(path: str, plan: Plan, target: Target) -> None:
    """In the process of the script: run it, and have its first `guard.step` run the capsule."""
    from stayfinite.capsule import read_capsule
    from stayfinite.guard.step import Order, give

    def tell(incident: Incident | None) -> None:
        write_atomically(os.path.join(plan.folder, _RESULT), to_json(incident))

    give(Order(capsule=read_capsule(path), tell=tell))
    try:
        execute(target)
    except CapsuleError as error:
        sys.exit(f"stayfinite: {error}")
