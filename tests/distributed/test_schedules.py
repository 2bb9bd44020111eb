"""Random schedules of faults on ranks of every kind: nobody waits for ever, nobody goes apart.

One of them again, by its number N, which stands in brackets behind the name of the test:
`pytest --hypothesis-profile=prove 'tests/distributed/test_schedules.py' -k '[N]'`.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from parallel import LETHAL, Fault
from ranks import outcomes

SUPPORT = str(Path(__file__).parents[1] / "support")
IS_PROOF = settings.default.max_examples >= 5_000
COUNT = 500 if IS_PROOF else 30
KINDS = ("ddp", "fsdp2", "fsdp2-bf16", "fsdp1", "tp", "pipeline", "fsdp2-hsdp", "tp-fsdp2")
OF_FOUR = ("fsdp2-hsdp", "tp-fsdp2")
WHATS = ("data", "forward", "backward", "optimizer", "flip", "stuck", *LETHAL)
STEPS = 5
PATIENCE = 30  # seconds that a rank waits for another one in a collective
BODY = """
sys.path.insert(0, {support!r})
from parallel import train
said = train({kind!r}, steps={steps}, faults={faults!r}, on_nan={on_nan!r}, ours={ours})
without = left_out(said)
if without is not None:
    said["reference"] = train({kind!r}, **without)["weights"]
json.dump(said, open(f"{{folder}}/{{me}}.json", "w"))
"""
LEFT_OUT = """
def left_out(said):
    if said["error"] is not None and not said["error"].startswith("TrainingAbortedError: stopped"):
        return None
    answered = [each for each in said["incidents"] if each["did"] != "the step was computed again"]
    steps = [each["step"] for each in answered]
    how = [each["strategy"] for each in answered]
    if HAS_HARM:  # it goes back to a snapshot, or was told after an update
        return None
    if how == ["stop"]:
        return {"steps": steps[0]}
    return {"steps": STEPS, "skips": steps} if set(how) <= {"skip", "reduce_scale"} else None
"""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A training, and what befalls it."""

    kind: str
    world: int
    on_nan: str
    ours: bool  # by `guard.step`
    faults: tuple[Fault, ...]

    @property
    def whats(self) -> set[str]:
        return {each.what for each in self.faults}

    @property
    def lethal(self) -> Fault | None:
        """The first fault that ends a rank."""
        found = [each for each in self.faults if each.what in LETHAL]
        return min(found, key=lambda each: each.step, default=None)


def schedule_of(number: int) -> Schedule:
    """Always the same one for a number; kinds come by turns."""
    chance = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    world = 4 if kind in OF_FOUR else chance.choice((2, 2, 4))
    on_nan = chance.choice(("recover", "recover", "stop", "warn"))
    faults, has_lethal = [], False
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3))):
        what = chance.choice([each for each in WHATS if not (has_lethal and each in LETHAL)])
        has_lethal = has_lethal or what in LETHAL
        # What an update has done to the weights is told with the next one.
        steps = range(2, STEPS - 1) if what == "optimizer" else range(STEPS)
        faults.append(Fault(what, chance.choice(steps), chance.randrange(world)))
    ours = on_nan == "recover" and kind != "pipeline" and chance.random() < 0.3
    return Schedule(kind=kind, world=world, on_nan=on_nan, ours=ours, faults=tuple(faults))


def run(folder: Path, schedule: Schedule) -> tuple[list[int], list[dict[str, Any]], list[str]]:
    """Exit codes, what each rank tells (nothing if it was killed), and what it printed."""
    given = asdict(schedule) | {"faults": [tuple(each) for each in schedule.faults]}
    left_out = f"STEPS, HAS_HARM = {STEPS}, {'optimizer' in schedule.whats}\n{LEFT_OUT}"
    body = left_out + BODY.format(support=SUPPORT, steps=STEPS, **given)
    codes, printed = outcomes(folder, body, world=schedule.world, seconds=PATIENCE)
    files = [folder / f"{rank}.json" for rank in range(schedule.world)]
    return codes, [json.loads(f.read_text()) if f.exists() else {} for f in files], printed


def replica_of(schedule: Schedule, rank: int) -> int:
    """Ranks for which this is the same have the same replicated weights."""
    shards = schedule.world // 2
    groups = {"ddp": 0, "tp": 0, "fsdp2-hsdp": rank % shards, "tp-fsdp2": rank // 2}
    return groups.get(schedule.kind, rank)


def problems(schedule: Schedule, codes: list[int], ranks: list[dict[str, Any]]) -> list[str]:
    """What is wrong with how it ended; none as it should be."""
    lethal, found = schedule.lethal, []
    alive = [rank for rank in range(schedule.world) if ranks[rank]]
    killed = [rank for rank, code in enumerate(codes) if code < 0]
    for rank, code in enumerate(codes):
        if code and not (code == -9 and lethal is not None and lethal.rank == rank):
            found.append(f"rank {rank} ended with {code}")
    errors = {rank: ranks[rank]["error"] or "" for rank in alive}
    found += [f"rank {r} waited: {e}" for r, e in errors.items() if "imed out" in e]
    others = [r for r in alive if lethal is None or r != lethal.rank]
    stopped = [r for r in alive if errors[r].startswith("TrainingAbortedError")]
    if lethal is None or stopped:
        if len({errors[r] for r in alive}) > 1:
            found.append(f"errors differ: {errors}")
    elif any(not errors[r] for r in alive):
        found.append(f"a rank has not noticed that {lethal.rank} is gone: {errors}")
    elif lethal.what.startswith("raise"):
        for r in others:
            if not says(errors[r] + "".join(ranks[r]["notes"]), lethal.rank):
                found.append(f"rank {r} does not say who ended: {errors[r]} {ranks[r]['notes']}")
    elif not killed:
        found.append("nobody was killed")
    is_unheard = lethal is not None and "optimizer" in schedule.whats
    for r in alive if lethal is not None else ():
        # Nobody could be told any more of what the last update has done.
        told = [each for each in ranks[r]["incidents"] if each["strategy"] not in ("none", "reset")]
        ranks[r] |= {"incidents": told}
        if is_unheard:
            ranks[r] |= {"updates": None}
    for what in ("incidents", "updates"):
        if len({json.dumps(ranks[r][what]) for r in alive}) > 1:
            found.append(f"{what} differ: {[ranks[r][what] for r in alive]}")
    is_ours_to_answer = schedule.on_nan != "warn" and not is_unheard
    by_replica: dict[int, set[str]] = {}
    for r in alive:
        by_replica.setdefault(replica_of(schedule, r), set()).add(ranks[r]["replicated"])
        if "reference" in ranks[r] and ranks[r]["reference"] != ranks[r]["weights"]:
            found.append(f"rank {r} has other weights than a run without these steps")
        if is_ours_to_answer and not stopped and not ranks[r]["is_finite"]:
            found.append(f"rank {r} has bad weights")
    # What is not undone: an update that was made before it was told of, or all with "warn".
    kept = {"recover": set(), "stop": {"optimizer"}, "warn": {"flip", "stuck", "optimizer"}}
    may_differ = bool(kept[schedule.on_nan] & schedule.whats) or is_unheard
    if not may_differ and any(len(each) > 1 for each in by_replica.values()):
        found.append("replicas differ")
    return found + unnoticed(schedule, ranks[others[0]] if others else {})


def says(text: str, rank: int) -> bool:
    """Whether it tells that this rank has ended, and why; a pipeline has an error around it."""
    return f"rank {rank} ended: " in text and "ValueError: a bad file on this rank" in text


def unnoticed(schedule: Schedule, rank: dict[str, Any]) -> list[str]:
    """Faults that no incident tells of, or that are told of another rank."""
    if not rank or schedule.on_nan == "warn":
        return []
    end = schedule.lethal.step if schedule.lethal is not None else STEPS
    told, found = rank["incidents"], []
    if (rank["error"] or "").startswith("TrainingAbortedError"):
        end = told[-1]["step"] + 1
    for each in schedule.faults:
        before = Fault("optimizer", each.step - 1)  # the update after it is left out in any case
        is_left_out = any(f[:2] == before[:2] for f in schedule.faults)
        if each.what in (*LETHAL, "optimizer") or each.step >= end or is_left_out:
            continue
        own = [incident for incident in told if incident["step"] == each.step]
        if not own:
            found.append(f"nobody tells of {each}")
            continue
        is_alone = len([f for f in schedule.faults if f.step == each.step]) == 1
        if is_alone and own[0]["rank"] not in ranks_of(schedule, each):
            found.append(f"{each} is told of rank {own[0]['rank']}")
    return found


def ranks_of(schedule: Schedule, fault: Fault) -> tuple[int, ...]:
    """Those that may be named for it."""
    in_batch = fault.what in ("data", "forward", "backward")
    if schedule.kind == "pipeline" and in_batch:
        is_target = fault.what == "data" and fault.rank == schedule.world - 1
        return (fault.rank,) if is_target else (0,)
    if schedule.kind == "tp" and in_batch:
        return (0,)
    if schedule.kind == "tp-fsdp2" and in_batch:
        return (fault.rank // 2 * 2, fault.rank // 2 * 2 + 1)
    return (fault.rank,)


@pytest.mark.parametrize("number", range(COUNT))
def test_ranks_neither_hang_nor_disagree(tmp_path: Path, number: int) -> None:
    schedule = schedule_of(number)
    codes, ranks, printed = run(tmp_path, schedule)
    wrong = problems(schedule, codes, ranks)
    assert not wrong, "\n".join([str(schedule), *wrong, *printed])
