"""Every kind of parallelism: a healthy run stays as it is, a bad step is left out by all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from parallel import BACKWARD_LINE, FORWARD_LINE
from ranks import answers

pytestmark = pytest.mark.xdist_group("matrix")  # each scene is run once
SUPPORT = str(Path(__file__).parents[1] / "support")
BODY = """
sys.path.insert(0, {support!r})
from parallel import train
said = {{str(scene): train(scene[0], **scene[1]) for scene in {scenes!r}}}
"""
Scene = tuple[str, dict[str, Any]]


def run(folder: Path, scenes: list[Scene], *, world: int) -> dict[str, list[Any]]:
    body = BODY.format(support=SUPPORT, scenes=scenes)
    said = answers(folder, body, world=world, seconds=120)
    return {name: [each[name] for each in said] for name in said[0]}


def of(found: dict[str, list[Any]], kind: str, **how: Any) -> list[Any]:
    return found[str((kind, how))]


HEALTHY = [
    *("ddp", "ddp-view", "fsdp2", "fsdp2-keep", "fsdp2-bf16", "fsdp2-fp16"),
    *("fsdp1", "fsdp1-orig", "tp", "pipeline"),
]
ACCUMULATING = ("ddp", "fsdp2", "fsdp2-bf16", "fsdp2-fp16", "fsdp1", "tp")
MORE = {"accumulate": 2, "also": ["checkpointing", "optimizers", "uneven"]}
COMPILED = ("ddp", "fsdp2", "fsdp1")
FOUR = ("fsdp2-hsdp", "tp-fsdp2")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    scenes: list[Scene] = [(kind, {"steps": 3}) for kind in HEALTHY]
    scenes += [(kind, {"steps": 3, "on_nan": "recover"}) for kind in HEALTHY]
    scenes += [(kind, {"steps": 3, "on_nan": "stop"}) for kind in ("ddp", "fsdp2", "pipeline")]
    scenes += [("ddp", {"steps": 3, "joins": True})]
    scenes += [("ddp", {"steps": 3, "joins": True, "on_nan": "recover"})]
    for kind, how in richer(ACCUMULATING, COMPILED):
        scenes += [(kind, {"steps": 3, **how}), (kind, {"steps": 3, **how, "on_nan": "recover"})]
    return run(tmp_path_factory.mktemp("healthy"), scenes, world=2)


def richer(kinds: Iterable[str], compiled: Iterable[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Trainings with all that a real one may have besides."""
    return [(kind, MORE) for kind in kinds] + [(kind, {"also": ["compile"]}) for kind in compiled]


def same_training(one: list[Any], two: list[Any]) -> bool:
    keys = ("weights", "losses", "updates")
    return [[each[k] for k in keys] for each in one] == [[each[k] for k in keys] for each in two]


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_is_byte_identical(healthy: dict[str, list[Any]], kind: str) -> None:
    plain = of(healthy, kind, steps=3)
    ours = [name for name in healthy if name.startswith(f"('{kind}', ") and "on_nan" in name]
    others = ("accumulate", "also", "joins")
    for watched in (healthy[n] for n in ours if not any(word in n for word in others)):
        assert same_training(plain, watched)
        assert [each["incidents"] for each in watched] == [[], []]


@pytest.mark.parametrize(("kind", "how"), richer(ACCUMULATING, COMPILED))
def test_accumulation_checkpointing_and_the_like_are_byte_identical(
    healthy: dict[str, list[Any]], kind: str, how: dict[str, Any]
) -> None:
    """With no_sync() or set_requires_gradient_sync(), two optimizers, and uneven batches."""
    plain = of(healthy, kind, steps=3, **how)
    watched = of(healthy, kind, steps=3, **how, on_nan="recover")
    assert [each["error"] for each in plain] == [None, None]
    assert same_training(plain, watched)
    assert [each["incidents"] for each in watched] == [[], []]


def test_a_rank_that_ends_early_is_not_waited_for(healthy: dict[str, list[Any]]) -> None:
    """Inside DDP's join() the others go on without it."""
    plain = of(healthy, "ddp", steps=3, joins=True)
    assert same_training(plain, of(healthy, "ddp", steps=3, joins=True, on_nan="recover"))
    assert [each["updates"] for each in plain] == [[3], [2]]


COUNTED = ("ddp", "fsdp2", "tp")


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    scenes: list[Scene] = [(kind, {"steps": 3, "counts": True}) for kind in COUNTED]
    for on_nan in ("stop", "warn", "recover"):
        scenes += [(kind, {"steps": 3, "counts": True, "on_nan": on_nan}) for kind in COUNTED]
    return run(tmp_path_factory.mktemp("counted"), scenes, world=2)


@pytest.mark.parametrize("on_nan", ["stop", "warn", "recover"])
@pytest.mark.parametrize("kind", COUNTED)
def test_one_small_collective_for_each_update_and_no_other(
    counted: dict[str, list[Any]], kind: str, on_nan: str
) -> None:
    plain = of(counted, kind, steps=3, counts=True)[0]["count"]
    for each in of(counted, kind, steps=3, counts=True, on_nan=on_nan):
        more = {name: n - plain.get(name, 0) for name, n in each["count"].items()}
        assert {name: n for name, n in more.items() if n} == {"allreduce_": 3}


KINDS = (
    *("ddp", "fsdp2", "fsdp2-keep", "fsdp2-bf16", "fsdp2-fp16", "fsdp1", "fsdp1-orig"),
    *("tp", "pipeline"),
)
FAULTS = ("data", "forward", "backward", "flip")
SCALED = ("fsdp2-fp16", "backward")  # the scaler skips it by itself
CELLS = [(kind, fault) for kind in KINDS for fault in FAULTS if (kind, fault) != SCALED]
CELLS_OF_FOUR = [(kind, fault) for kind in FOUR for fault in FAULTS]
STEPS = 6
AFTERWARDS = {"skips": list(range(STEPS))}  # 8 steps in all, and step 5 tells of step 4


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for kinds in (KINDS[:3], KINDS[3:6], KINDS[6:]):
        scenes: list[Scene] = [(kind, {"steps": STEPS, "skips": True}) for kind in kinds]
        cells = [cell for cell in (*CELLS, SCALED) if cell[0] in kinds]
        scenes += [(k, {"steps": STEPS, "fault": f, "on_nan": "recover"}) for k, f in cells]
        found |= run(tmp_path_factory.mktemp("broken"), scenes + harmed_scenes(kinds), world=2)
    return found


def harmed_scenes(kinds: Iterable[str]) -> list[Scene]:
    """An update that makes weights bad; and a run that has only the steps after it."""
    ways: list[dict[str, Any]] = [{"fault": "optimizer", "on_nan": "recover"}, AFTERWARDS]
    return [(kind, how) for kind in kinds for how in ways]


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    scenes: list[Scene] = [(kind, {"steps": STEPS, "skips": True}) for kind in FOUR]
    scenes += [(kind, {"steps": 3}) for kind in FOUR]
    scenes += [(kind, {"steps": 3, "on_nan": "recover"}) for kind in FOUR]
    scenes += [(kind, {"steps": 3, **MORE}) for kind in FOUR]
    scenes += [(kind, {"steps": 3, **MORE, "on_nan": "recover"}) for kind in FOUR]
    scenes += [(k, {"steps": STEPS, "fault": f, "on_nan": "recover"}) for k, f in CELLS_OF_FOUR]
    scenes += harmed_scenes(FOUR)
    return run(tmp_path_factory.mktemp("four"), scenes, world=4)


def left_out_together(found: dict[str, list[Any]], kind: str, fault: str) -> dict[str, Any]:
    """The one incident, after a look at everything else."""
    reference = of(found, kind, steps=STEPS, skips=True)
    ranks = of(found, kind, steps=STEPS, fault=fault, on_nan="recover")
    assert [each["error"] for each in ranks] == [None] * len(ranks)
    assert [each["weights"] for each in ranks] == [each["weights"] for each in reference]
    assert [each["updates"] for each in ranks] == [[STEPS - 1]] * len(ranks)
    first = ranks[0]["incidents"]
    assert all(each["incidents"] == first for each in ranks)
    assert len(first) == 1
    incident: dict[str, Any] = first[0]
    assert incident["step"] == 4
    return incident


@pytest.mark.parametrize(("kind", "fault"), CELLS)
def test_all_ranks_leave_the_same_step_out(
    broken: dict[str, list[Any]], kind: str, fault: str
) -> None:
    incident = left_out_together(broken, kind, fault)
    is_same_batch = kind == "tp" and fault != "flip"
    is_first_stage = kind == "pipeline" and fault in LINES  # the bad target is the last one's
    assert incident["rank"] == (0 if is_same_batch or is_first_stage else 1)


def test_a_scaler_that_skips_by_itself_is_left_to_it(broken: dict[str, list[Any]]) -> None:
    kind, fault = SCALED
    ranks = of(broken, kind, steps=STEPS, fault=fault, on_nan="recover")
    reference = of(broken, kind, steps=STEPS, skips=True)
    assert [each["weights"] for each in ranks] == [each["weights"] for each in reference]
    assert [each["incidents"] for each in ranks] == [[], []]


@pytest.mark.parametrize(("kind", "fault"), CELLS_OF_FOUR)
def test_four_ranks_leave_the_same_step_out(
    of_four: dict[str, list[Any]], kind: str, fault: str
) -> None:
    incident = left_out_together(of_four, kind, fault)
    same_batch = (0, 1) if kind == "tp-fsdp2" and fault != "flip" else (1,)
    assert incident["rank"] in same_batch


@pytest.mark.parametrize("kind", FOUR)
def test_a_healthy_run_of_four_is_byte_identical(of_four: dict[str, list[Any]], kind: str) -> None:
    for how in ({}, MORE):
        plain = of(of_four, kind, steps=3, **how)
        watched = of(of_four, kind, steps=3, **how, on_nan="recover")
        assert [each["error"] for each in plain] == [None] * 4
        assert same_training(plain, watched)
        assert [each["incidents"] for each in watched] == [[]] * 4


LINES = {
    "forward": (FORWARD_LINE, "embed", "cosine_zero_vector"),
    "backward": (BACKWARD_LINE, "gate", "sqrt_grad_at_zero"),
}


@pytest.mark.parametrize(("kind", "fault"), [cell for cell in CELLS if cell[1] in LINES])
def test_the_line_is_found_where_it_stands_whatever_the_reduction(
    broken: dict[str, list[Any]], kind: str, fault: str
) -> None:
    incident = left_out_together(broken, kind, fault)
    line, module, cause = LINES[fault]
    module = f"0.{module}" if kind == "pipeline" else module  # of its stage
    assert (incident["code"], incident["module"]) == (line, module)
    assert incident["cause"] == ("low_precision_underflow" if "fp16" in kind else cause)


@pytest.mark.parametrize("fault", LINES)
@pytest.mark.parametrize("kind", FOUR)
def test_four_ranks_find_the_line(of_four: dict[str, list[Any]], kind: str, fault: str) -> None:
    incident = left_out_together(of_four, kind, fault)
    assert (incident["code"], incident["module"], incident["cause"]) == LINES[fault]


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_is_bad_already_is_called_so(broken: dict[str, list[Any]], kind: str) -> None:
    assert left_out_together(broken, kind, "data")["cause"] == "bad_input_data"


@pytest.mark.parametrize("kind", [*KINDS, *FOUR])
def test_an_update_that_harms_one_rank_is_undone_on_all(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """All are as if they had begun after it: the only snapshot is that of the beginning."""
    found = request.getfixturevalue("of_four" if kind in FOUR else "broken")
    ranks = of(found, kind, fault="optimizer", on_nan="recover")
    reference = of(found, kind, **AFTERWARDS)
    assert [each["weights"] for each in ranks] == [each["weights"] for each in reference]
    assert [each["updates"] for each in ranks] == [[2]] * len(ranks)
    (incident,) = ranks[0]["incidents"]
    assert all(each["incidents"] == [incident] for each in ranks)
    assert (incident["step"], incident["rank"]) == (4, 1)
    assert incident["did"].startswith("the state of 5 good steps before was put back")


STOPPED = [("ddp", "forward"), ("fsdp2", "forward"), ("fsdp2", "flip"), ("pipeline", "forward")]


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    scenes: list[Scene] = [(k, {"steps": STEPS, "fault": f, "on_nan": "stop"}) for k, f in STOPPED]
    scenes += [("fsdp2", {"steps": STEPS, "fault": "forward", "on_nan": "warn"})]
    for fault in ("forward", "backward"):
        scenes += [("fsdp2", {"steps": STEPS, "fault": fault, "on_nan": "recover", "ours": True})]
    scenes += [("fsdp2", {"steps": STEPS, "skips": True})]
    return run(tmp_path_factory.mktemp("more"), scenes, world=2)


@pytest.mark.parametrize(("kind", "fault"), STOPPED)
def test_all_ranks_stop_with_the_same_incident(
    more: dict[str, list[Any]], kind: str, fault: str
) -> None:
    first, second = of(more, kind, steps=STEPS, fault=fault, on_nan="stop")
    assert first["error"] == second["error"]
    assert first["error"].startswith("TrainingAbortedError: stopped at step 4: ")
    assert first["incidents"] == second["incidents"]
    assert first["updates"] == second["updates"] == [4]
    assert first["incidents"][0]["rank"] == (0 if kind == "pipeline" else 1)


def test_all_ranks_warn_of_the_same_incident(more: dict[str, list[Any]]) -> None:
    first, second = of(more, "fsdp2", steps=STEPS, fault="forward", on_nan="warn")
    assert first["incidents"] == second["incidents"]
    assert first["incidents"][0]["rank"] == 1
    assert first["updates"] == second["updates"] == [STEPS]


@pytest.mark.parametrize(
    ("fault", "line", "module"),
    [("forward", FORWARD_LINE, "embed"), ("backward", BACKWARD_LINE, "gate")],
)
def test_a_step_of_ours_finds_the_line_beyond_the_reduction(
    more: dict[str, list[Any]], fault: str, line: str, module: str
) -> None:
    ranks = of(more, "fsdp2", steps=STEPS, fault=fault, on_nan="recover", ours=True)
    reference = of(more, "fsdp2", steps=STEPS, skips=True)
    assert [each["weights"] for each in ranks] == [each["weights"] for each in reference]
    (incident,) = ranks[0]["incidents"]
    assert ranks[1]["incidents"] == [incident]
    assert (incident["rank"], incident["code"], incident["module"]) == (1, line, module)
