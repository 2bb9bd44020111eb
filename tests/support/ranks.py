"""Real processes that talk over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import stayfinite

SOURCE = str(Path(stayfinite.__file__).resolve().parents[1])
HEAD = """
import json, sys, torch, torch.distributed as dist
from stayfinite.distributed import agree, rank, world_size
folder, me, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group({how}, init_method=f"file://{{folder}}/meeting", rank=me, world_size=world)
"""
TAIL = """
json.dump(said, open(f"{folder}/{me}.json", "w"))
dist.destroy_process_group()
"""


def answers(folder: Path, body: str, *, world: int = 2, how: str = '"gloo"') -> list[Any]:
    """What each process has put into `said`; it finds its rank in `me`."""
    script = folder / "rank.py"
    script.write_text(HEAD.format(how=how) + body + TAIL)
    command = [sys.executable, str(script), str(folder)]
    environment = {"PYTHONPATH": SOURCE, "PATH": "", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, str(me), str(world)], env=environment, stderr=subprocess.PIPE)
        for me in range(world)
    ]
    try:
        errors = [process.communicate(timeout=240)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, "\n".join(errors)
    return [json.loads((folder / f"{me}.json").read_text()) for me in range(world)]
