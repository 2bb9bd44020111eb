"""Real processes that talk over gloo."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forks import SOURCE, Fork

HEAD = """
import datetime, json, sys, torch, torch.distributed as dist
from stayfinite.distributed import agree, rank, world_size
folder, me, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group({how}, init_method=f"file://{{folder}}/meeting", rank=me, world_size=world)
"""
TAIL = """
json.dump(said, open(f"{folder}/{me}.json", "w"))
dist.destroy_process_group()
"""


def answers(
    folder: Path,
    body: str,
    *,
    world: int = 2,
    how: str = '"gloo"',
    seconds: float = 60,
    having: Sequence[str] = (),
) -> list[Any]:
    """What each process has put into `said`; it finds its rank in `me`.

    Whoever waits for another rank longer than these seconds gets an error. `having` are modules
    that the processes find imported.
    """
    codes, said = outcomes(
        folder, body + TAIL, world=world, how=how, seconds=seconds, having=having
    )
    assert codes == [0] * world, "\n".join(said)
    return [json.loads((folder / f"{me}.json").read_text()) for me in range(world)]


def outcomes(
    folder: Path,
    body: str,
    *,
    world: int = 2,
    how: str = '"gloo"',
    seconds: float = 60,
    having: Sequence[str] = (),
) -> tuple[list[int], list[str]]:
    """The exit codes of the processes, and what they printed."""
    script = folder / "rank.py"
    if "timeout" not in how:
        how += f", timeout=datetime.timedelta(seconds={seconds})"
    script.write_text(HEAD.format(how=how) + body)
    environment = {"PYTHONPATH": SOURCE, "PATH": "", "OMP_NUM_THREADS": "1"}
    processes = []
    for me in range(world):
        words = [str(script), str(folder), str(me), str(world)]
        # What torchrun sets, and frameworks go by.
        given = {"RANK": me, "LOCAL_RANK": me, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        env = environment | {name: str(value) for name, value in given.items()}
        with open(folder / f"{me}.out", "wb") as out:
            processes.append(
                Fork(words, env=env, cwd=folder, stdout=out, stderr=out, having=having)
            )
    codes = [process.wait(timeout=240) for process in processes]
    return codes, [(folder / f"{me}.out").read_text() for me in range(world)]
