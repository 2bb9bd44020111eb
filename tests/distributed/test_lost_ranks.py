"""A rank that ends: the others end too, at once, and say which one it was and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import settings
from ranks import outcomes

SUPPORT = str(Path(__file__).parents[1] / "support")
IS_PROOF = settings.default.max_examples >= 5_000
BODY = """
sys.path.insert(0, {support!r})
from parallel import train
end = train({kind!r}, faults=[({fault!r}, 1, 1)], on_nan="recover", steps=2)
json.dump(end, open(f"{{folder}}/{{me}}.json", "w"))
sys.exit(1)
"""
KINDS = (
    *("ddp", "fsdp2", "fsdp2-keep", "fsdp2-bf16", "fsdp2-fp16", "fsdp1", "fsdp1-orig"),
    *("tp", "pipeline", "fsdp2-hsdp", "tp-fsdp2"),
)
FAULTS = ("raise", "kill", "kill-backward")
# Each kind has one of them, by turns, if not all are wanted.
CELLS = [
    (kind, fault)
    for number, kind in enumerate(KINDS)
    for turn, fault in enumerate(FAULTS)
    if IS_PROOF or number % len(FAULTS) == turn
]


@pytest.mark.parametrize(("kind", "fault"), CELLS)
def test_the_others_end_with_a_rank_that_is_lost(tmp_path: Path, kind: str, fault: str) -> None:
    """At once, with an error that says who it was if that one could tell; nothing is updated."""
    world = 4 if kind in ("fsdp2-hsdp", "tp-fsdp2") else 2
    body = BODY.format(support=SUPPORT, kind=kind, fault=fault)
    codes, printed = outcomes(tmp_path, body, world=world, seconds=100)
    is_killed = fault.startswith("kill")
    assert codes == [-9 if is_killed and rank == 1 else 1 for rank in range(world)], printed
    for rank in set(range(world)) - {1}:
        end = json.loads((tmp_path / f"{rank}.json").read_text())
        said = end["error"] + "".join(end["notes"])
        assert "imed out" not in said
        assert (WHY in said) is not is_killed
        assert "ended:" not in said or not is_killed  # nobody has said so
        assert (end["incidents"], end["updates"], end["is_finite"]) == ([], [1], True)


WHY = "rank 1 ended: ValueError: a bad file on this rank"


GIVES_UP = """
sys.path.insert(0, {support!r})
import time, parallel
from stayfinite.detect.hooks import is_run_again

theirs = parallel.batch_of

def batch_of(*given):
    if is_run_again() and me == 1:
        raise OSError("the disk is gone")
    return theirs(*given)

parallel.batch_of = batch_of
end = parallel.train("fsdp2", fault="forward", on_nan="recover", steps=6)
print(end["error"], end["notes"], flush=True)
sys.exit(1)
"""


def test_a_rank_that_cannot_run_a_step_again_tells_the_others(tmp_path: Path) -> None:
    """They wait for it in a collective, and end when it does, long before that would time out."""
    codes, said = outcomes(tmp_path, GIVES_UP.format(support=SUPPORT), seconds=120)
    assert codes == [1, 1]
    why = "a step could not be run again on all ranks (it raised OSError: the disk is gone)"
    assert f"TrainingAbortedError: {why}, and the others wait for this one." in said[1]
    assert (
        f"PeerLostError: training cannot go on: rank 1 ended: TrainingAbortedError: {why}"
        in said[0]
    )
