"""The script of a capsule, run in a folder of its own and traced as a second run is."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stayfinite.errors import CapsuleError
from stayfinite.records import Incident, from_json, to_json
from stayfinite.runner import tree
from stayfinite.runner.again import (
    GRACE,
    end,
    has_incident,
    last_lines,
    sign_of_life,
    start,
    why_unheld,
)
from stayfinite.runner.options import RunOptions
from stayfinite.runner.plan import Plan, write_atomically
from stayfinite.runner.sandbox import allowed_kinds
from stayfinite.runner.scene import Scene
from stayfinite.runner.script import Target, execute
from stayfinite.runner.second import TRACE_ALL
from stayfinite.runner.seeds import write_seeds

if TYPE_CHECKING:
    from stayfinite.capsule import Capsule
    from stayfinite.capsule.unpacking import Unpacked

ORDER = "STAYFINITE_CAPSULE"
_RESULT = "replayed.json"


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of a replay; `problem` and the last lines of the script if it did not get there."""

    incident: Incident | None = None
    problem: str | None = None
    tail: tuple[str, ...] = ()


def replay(capsule: Capsule, path: Path, *, seconds: float) -> Replayed:
    """Run the script of the capsule, which must be trusted; it is ended after so many seconds."""
    if not capsule.sources or not capsule.code.command:
        raise CapsuleError(f"{path} has no source files to run; give the model with --model.")
    if capsule.code.kind == "step" and (not capsule.batch or capsule.state is None):
        raise CapsuleError(
            f"{path} was made without its batch or state, so its step cannot be run again. Make "
            "it anew with with_batch=True."
        )
    with _place() as folder:
        scene = _scene(capsule, folder, path)
        process = start(scene, scene.plan)
        began = time.monotonic()
        seen = 0.0
        try:
            with sign_of_life("running the script of the capsule, traced"):
                while process.poll() is None:
                    passed = time.monotonic() - began
                    seen = seen or (passed if has_incident(scene.plan) else 0.0)
                    if passed > seconds or (seen and passed > seen + GRACE):
                        break
                    time.sleep(min(0.5, 0.02 + passed / 20))
        finally:
            end(process)
        if (reason := why_unheld(scene.plan)) is not None:
            raise CapsuleError(f"{path} was not replayed: {reason}")
        return _outcome(capsule, scene.plan, process.returncode)


@contextmanager
def _place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stayfinite-replay-") as name:
        yield Path(name).resolve()


def _scene(capsule: Capsule, folder: Path, path: Path) -> Scene:
    from stayfinite.capsule.unpacking import unpack

    unpacked = unpack(capsule, folder)
    for name in ("plan", "seeds"):
        (folder / name).mkdir()
    write_seeds(str(folder / "seeds"), capsule.seeds)
    words = capsule.code.command
    is_module = words[0] == "-m"
    name, *args = words[1:] if is_module else words
    plan = Plan(
        folder=str(folder / "plan"),
        guard={
            "on_nan": "stop",
            "max_scaler_skips": _whole(capsule.config.get("max_scaler_skips"), 20),
            "folder": str(unpacked.project / capsule.code.folder),
            **_tracing(capsule.config),
        },
        repeat=str(folder / "seeds"),
        sandboxes=allowed_kinds(),
        writable=(str(folder),),
    )
    plan.save()
    return Scene(
        target=Target(name=name, args=tuple(args), is_module=is_module),
        options=RunOptions(no_record=True),
        plan=plan,
        cwd=str(unpacked.project),
        environment=_environment(capsule, unpacked, path),
    )


def _tracing(config: dict[str, Any]) -> dict[str, Any]:
    """From the start where that is cheap, as the second run was."""
    seconds, arm_at = config.get("seconds"), config.get("arm_at")
    is_long = isinstance(seconds, float) and seconds >= TRACE_ALL
    if is_long and isinstance(arm_at, int):
        return {"trace": "armed", "arm_at": arm_at}
    return {"trace": "start", "arm_at": None}


def _whole(value: Any, default: int) -> int:
    return value if type(value) is int and value > 0 else default


def _environment(capsule: Capsule, unpacked: Unpacked, path: Path) -> dict[str, str]:
    from stayfinite.capsule.surroundings import usable

    here = os.environ.get("PYTHONPATH", "")
    paths = [*map(str, unpacked.paths), *([here] if here else [])]
    found = {**os.environ, **usable(capsule.environment), "PYTHONPATH": os.pathsep.join(paths)}
    if capsule.code.kind == "step":
        found[ORDER] = str(path.resolve())
    return found


def _outcome(capsule: Capsule, plan: Plan, code: int | None) -> Replayed:
    if capsule.code.kind == "step":
        incident, is_told = _told(plan)
    else:
        found = tree.first_incident(tree.load(plan.folder))
        incident, is_told = (found[1] if found else None), found is not None or code == 0
    if is_told:
        return Replayed(incident=incident)
    how = f"ended with exit code {code}" if code is not None and code >= 0 else "was ended"
    return Replayed(problem=f"the script {how} before it got there:", tail=last_lines(plan))


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
    from stayfinite.guard.orders import Order, give

    def tell(incident: Incident | None) -> None:
        write_atomically(os.path.join(plan.folder, _RESULT), to_json(incident))

    give(Order(capsule=read_capsule(path), tell=tell))
    try:
        execute(target)
    except CapsuleError as error:
        sys.exit(f"stayfinite: {error}")
