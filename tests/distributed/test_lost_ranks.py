"""A rank that ends: the others end too, at once, and say which one it was and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import outcomes

SUPPORT = str(Path(__file__).parents[1] / "support")
BODY = """
sys.path.insert(0, {support!r})
from parallel import train
end = train({kind!r}, fault={fault!r}, on_nan="recover")
print(end["error"], end["notes"], flush=True)
sys.exit(1)
"""
WHY = "rank 1 ended: ValueError: a bad file on this rank"


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_others_say_which_rank_raised_and_why(tmp_path: Path, kind: str) -> None:
    body = BODY.format(support=SUPPORT, kind=kind, fault="raise")
    codes, said = outcomes(tmp_path, body, seconds=60)
    assert codes == [1, 1]
    assert WHY in said[0]
    assert "ValueError: a bad file on this rank" in said[1]


def test_a_rank_that_is_killed_is_not_waited_for(tmp_path: Path) -> None:
    body = BODY.format(support=SUPPORT, kind="ddp", fault="kill")
    codes, said = outcomes(tmp_path, body, seconds=60)
    assert codes == [1, -9]
    assert "Error" in said[0]
    assert "ended:" not in said[0]  # nobody has said so


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
