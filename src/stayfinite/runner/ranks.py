"""Runs that a launcher started side by side, one per rank, as `torchrun -m stayfinite run` does.

There is no parent of ours to report for all, so the ranks of one machine meet in a folder.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
import time
import zlib

from stayfinite.runner import tree
from stayfinite.runner.watch import Watch, rank

GRACE = 1.0  # seconds in which other ranks may report the same step


def is_rank() -> bool:
    """Whether a launcher started this process as one of its ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def size() -> int:
    """How many ranks the launchers have started, on all machines together."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdigit() else 1


def shared_folder() -> str:
    """The folder in which the ranks of this launcher meet; only this user may look into it."""
    run = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ.get('MASTER_PORT', '')}"
    name = f"stayfinite-{os.getppid()}-{zlib.crc32(run.encode()):08x}"
    folder = os.path.join(tempfile.gettempdir(), name)
    _remove_stale()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and os.stat(folder).st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def heard_out(folder: str) -> list[tree.ProcessRecord]:
    """The records of all ranks; waits a moment for the others if one of them went bad."""
    records = tree.load(folder)
    if tree.first_incident(records) is not None:
        time.sleep(GRACE)
    return tree.load(folder)


def speaks(records: list[tree.ProcessRecord], watch: Watch) -> bool:
    """Whether this rank reports for all: the one where it began, or rank 0 when all is well."""
    found = tree.first_incident(records)
    return rank() == 0 if found is None else found[0].pid == watch.pid


def leave(watch: Watch) -> None:
    """Take this rank's files away; the last one to leave takes the folder.

    A stopped rank leaves its record, from which the others know why they lose it; what the
    others drew stays then, for its capsule.
    """
    if watch.has_stopped:
        return
    folder = glob.escape(watch.plan.folder)
    own = [f"process-{watch.pid}.json", watch.plan.path]
    if not any(record.stopped for record in tree.load(watch.plan.folder)):
        own.append(f"seeds-{watch.key}.json")
    for pattern in own:
        for path in glob.glob(os.path.join(folder, os.path.basename(pattern))):
            with contextlib.suppress(OSError):
                os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(watch.plan.folder)


def _remove_stale() -> None:
    for path in glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), "stayfinite-*-*")):
        launcher = os.path.basename(path).split("-")[1]
        if (
            launcher.isdigit()
            and not os.path.exists(f"/proc/{launcher}")
            and os.path.isdir("/proc")
        ):
            shutil.rmtree(path, ignore_errors=True)
