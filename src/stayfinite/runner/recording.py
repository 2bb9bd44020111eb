"""Where a run is recorded, and how its processes do it."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from stayfinite.errors import ConfigError
from stayfinite.report.store.environment import new_run_folder, run_info
from stayfinite.report.store.schema import RunInfo
from stayfinite.report.store.writer import StoreWriter
from stayfinite.runner.options import RunOptions
from stayfinite.runner.plan import Plan, ours
from stayfinite.runner.script import Target

if TYPE_CHECKING:
    from stayfinite.guard.recording import Recorder

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
    from stayfinite.guard.recording import Recorder

    folder = plan.run_dir
    return Recorder(lambda: StoreWriter(folder, lambda: _info(plan), in_thread=_is_ours))


def _is_ours() -> None:
    ours.is_writing = True  # what this thread writes is not the script's doing


def _info(plan: Plan) -> RunInfo:
    from stayfinite.runner.watch import rank

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
