"""Every kind of parallelism: a healthy run stays as it is, a bad step is left out by all ranks.

All cells are run by `make prove`; without it some kinds have a part of the faults.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from parallel import BACKWARD_LINE, FORWARD_LINE
from ranks import answers

pytestmark = pytest.mark.xdist_group("matrix")  # each scene is run once
IS_PROOF = settings.default.max_examples >= 5_000
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


KINDS = (
    *("ddp", "fsdp2", "fsdp2-keep", "fsdp2-bf16", "fsdp2-fp16", "fsdp1", "fsdp1-orig"),
    *("tp", "pipeline"),
)
FOUR = ("fsdp2-hsdp", "tp-fsdp2")  # of which a mesh has two dimensions
FAULTS = ("data", "forward", "backward", "flip", "optimizer")
SOME: dict[str, tuple[str, ...]] = {
    "fsdp2-keep": ("backward", "flip"),
    "fsdp2-bf16": ("forward", "optimizer"),
    "fsdp2-fp16": ("forward", "backward", "flip"),
    "fsdp1": ("forward", "backward", "flip", "optimizer"),
    "fsdp1-orig": ("data", "flip"),
    "tp": ("data", "forward", "flip", "optimizer"),
    "fsdp2-hsdp": ("backward", "flip"),
    "tp-fsdp2": ("forward", "flip", "optimizer"),
}
SCALED = ("fsdp2-fp16", "backward")  # the scaler skips it by itself


def cells(kinds: Iterable[str], *faults: str) -> list[tuple[str, str]]:
    """Those that are run, of these faults."""
    chosen = {} if IS_PROOF else SOME
    pairs = [(kind, fault) for kind in kinds for fault in faults]
    return [(kind, fault) for kind, fault in pairs if fault in chosen.get(kind, FAULTS)]


HEALTHY = [*KINDS, "ddp-view"]
STEPS = 6
MORE = {"accumulate": 2, "also": ["checkpointing", "optimizers", "uneven"]}
RICHER = KINDS if IS_PROOF else ("ddp", "fsdp2", "fsdp2-fp16", "fsdp1", "tp", "pipeline")
COMPILED = ("ddp", "fsdp2", "fsdp1", "tp", "pipeline") if IS_PROOF else ("fsdp2",)


def richer(kinds: Iterable[str], compiled: Iterable[str] = ()) -> list[Scene]:
    """Trainings with all that a real one may have besides."""
    return [(kind, MORE) for kind in kinds] + [(kind, {"also": ["compile"]}) for kind in compiled]


def healthy_scenes(kinds: Iterable[str], more: list[Scene]) -> list[Scene]:
    """Each twice, watched and not."""
    found: list[Scene] = [(kind, {}) for kind in kinds] + more
    scenes: list[Scene] = [(kind, {"steps": 3, **how}) for kind, how in found]
    return scenes + [(kind, {**how, "on_nan": "recover"}) for kind, how in scenes]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    more = [*richer(RICHER, COMPILED), ("ddp", {"joins": True})]
    scenes = healthy_scenes(HEALTHY, more)
    scenes += [(kind, {"steps": 3, "on_nan": "stop"}) for kind in ("fsdp2", "pipeline")]
    return run(tmp_path_factory.mktemp("healthy"), scenes, world=2)


def same_training(one: list[Any], two: list[Any]) -> bool:
    keys = ("weights", "losses", "updates")
    return [[each[k] for k in keys] for each in one] == [[each[k] for k in keys] for each in two]


def assert_byte_identical(found: dict[str, list[Any]], kind: str, **how: Any) -> None:
    plain = of(found, kind, steps=3, **how)
    assert [each["error"] for each in plain] == [None] * len(plain)
    for on_nan in ("recover", "stop"):
        watched = found.get(str((kind, {"steps": 3, **how, "on_nan": on_nan})))
        assert watched is not None or on_nan == "stop"
        if watched is not None:
            assert same_training(plain, watched)
            assert [each["incidents"] for each in watched] == [[]] * len(plain)


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_is_byte_identical(healthy: dict[str, list[Any]], kind: str) -> None:
    assert_byte_identical(healthy, kind)


@pytest.mark.parametrize(("kind", "how"), richer(RICHER, COMPILED))
def test_accumulation_checkpointing_and_the_like_are_byte_identical(
    healthy: dict[str, list[Any]], kind: str, how: dict[str, Any]
) -> None:
    """With no_sync() or set_requires_gradient_sync(), two optimizers, and uneven batches."""
    assert_byte_identical(healthy, kind, **how)


def test_a_rank_that_ends_early_is_not_waited_for(healthy: dict[str, list[Any]]) -> None:
    """Inside DDP's join() the others go on without it."""
    assert_byte_identical(healthy, "ddp", joins=True)
    assert [each["updates"] for each in of(healthy, "ddp", steps=3, joins=True)] == [[3], [2]]


COUNTED = ("ddp", "fsdp2", "tp")
COUNTED_FAULTS = [
    (kind, fault)
    for kind in (COUNTED if IS_PROOF else ("fsdp2",))
    for fault in (FAULTS if IS_PROOF else ("forward", "flip"))
]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    scenes: list[Scene] = [(kind, {"steps": 3, "counts": True}) for kind in COUNTED]
    for on_nan in ("stop", "warn", "recover"):
        scenes += [(kind, {"steps": 3, "counts": True, "on_nan": on_nan}) for kind in COUNTED]
    scenes += [(kind, counted_fault(fault)) for kind, fault in COUNTED_FAULTS]
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


def counted_fault(fault: str) -> dict[str, Any]:
    return {"steps": STEPS, "counts": True, "fault": fault, "on_nan": "recover"}


@pytest.mark.parametrize(("kind", "fault"), COUNTED_FAULTS)
def test_a_bad_step_needs_no_collective_of_some_ranks_only(
    counted: dict[str, list[Any]], kind: str, fault: str
) -> None:
    first, second = of(counted, kind, **counted_fault(fault))
    assert first["count"] == second["count"]
    assert len(first["incidents"]) == 1


AFTERWARDS = {"skips": list(range(STEPS))}  # 8 steps in all, and step 5 tells of step 4


def broken_scenes(kinds: Iterable[str]) -> list[Scene]:
    """Each cell, and what it is to be compared with."""
    ways: dict[str, dict[str, Any]] = {"flip": {"steps": STEPS}, "optimizer": AFTERWARDS}
    scenes: list[Scene] = []
    for kind, fault in cells(kinds, *FAULTS):
        reference = (kind, ways.get(fault, {"steps": STEPS, "skips": True}))
        scenes += [] if reference in scenes else [reference]
        long = {} if fault == "optimizer" else {"steps": STEPS}
        scenes.append((kind, {**long, "fault": fault, "on_nan": "recover"}))
    return scenes


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for kinds in (KINDS[:3], KINDS[3:6], KINDS[6:]):
        scenes = broken_scenes(kinds)
        found |= run(tmp_path_factory.mktemp("broken"), scenes, world=2)
    return found


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for kind in FOUR:
        more = richer([kind], [kind] if IS_PROOF else ())
        scenes = broken_scenes([kind]) + healthy_scenes([kind] if IS_PROOF else (), more)
        found |= run(tmp_path_factory.mktemp("four"), scenes, world=4)
    return found


def found_in(request: pytest.FixtureRequest, kind: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = request.getfixturevalue("of_four" if kind in FOUR else "broken")
    return found


def told_together(ranks: list[Any], *, step: int = 4) -> dict[str, Any]:
    """The one incident, which is the same on all ranks."""
    assert [each["error"] for each in ranks] == [None] * len(ranks)
    first = ranks[0]["incidents"]
    assert all(each["incidents"] == first for each in ranks)
    assert len(first) == 1
    incident: dict[str, Any] = first[0]
    assert incident["step"] == step
    return incident


def left_out_together(found: dict[str, list[Any]], kind: str, fault: str) -> dict[str, Any]:
    """The one incident, after a look at everything else."""
    reference = of(found, kind, steps=STEPS, skips=True)
    ranks = of(found, kind, steps=STEPS, fault=fault, on_nan="recover")
    incident = told_together(ranks)
    assert [each["weights"] for each in ranks] == [each["weights"] for each in reference]
    assert [each["updates"] for each in ranks] == [[STEPS - 1]] * len(ranks)
    return incident


LINES = {
    "forward": (FORWARD_LINE, "embed", "cosine_zero_vector"),
    "backward": (BACKWARD_LINE, "gate", "sqrt_grad_at_zero"),
}


def named_for(kind: str, fault: str) -> tuple[int, ...]:
    """Those of which one is to be named."""
    if kind == "tp-fsdp2":
        return (0, 1)  # they have the same batch
    # The bad target of a pipeline is the last stage's.
    return (0,) if kind == "tp" or (kind == "pipeline" and fault in LINES) else (1,)


BORN = [cell for cell in cells((*KINDS, *FOUR), *LINES) if cell != SCALED]


@pytest.mark.parametrize(("kind", "fault"), BORN)
def test_all_ranks_leave_the_same_step_out_and_name_its_line(
    request: pytest.FixtureRequest, kind: str, fault: str
) -> None:
    incident = left_out_together(found_in(request, kind), kind, fault)
    assert incident["rank"] in named_for(kind, fault)
    assert incident["reports"], "the rank where it began has none of the bad shards, perhaps"
    line, module, cause = LINES[fault]
    module = f"0.{module}" if kind == "pipeline" else module  # of its stage
    assert (incident["code"], incident["module"]) == (line, module)
    assert incident["cause"] == ("low_precision_underflow" if "fp16" in kind else cause)


def test_a_scaler_that_skips_by_itself_is_left_to_it(broken: dict[str, list[Any]]) -> None:
    kind, fault = SCALED
    ranks = of(broken, kind, steps=STEPS, fault=fault, on_nan="recover")
    reference = of(broken, kind, steps=STEPS, skips=True)
    assert [each["weights"] for each in ranks] == [each["weights"] for each in reference]
    assert [each["incidents"] for each in ranks] == [[], []]


@pytest.mark.parametrize("kind", [kind for kind, _ in cells((*KINDS, *FOUR), "data")])
def test_an_input_that_is_bad_already_is_called_so(
    request: pytest.FixtureRequest, kind: str
) -> None:
    incident = left_out_together(found_in(request, kind), kind, "data")
    assert incident["cause"] == "bad_input_data"
    assert incident["rank"] in named_for(kind, "data")


@pytest.mark.parametrize("kind", [kind for kind, _ in cells((*KINDS, *FOUR), "flip")])
def test_a_step_with_a_flipped_bit_is_computed_again(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """In place, by all ranks: the weights are those of a run without it."""
    found = found_in(request, kind)
    ranks, clean = (
        of(found, kind, steps=STEPS, **how) for how in ({"fault": "flip", "on_nan": "recover"}, {})
    )
    incident = told_together(ranks)
    assert [each["weights"] for each in ranks] == [each["weights"] for each in clean]
    assert [each["updates"] for each in ranks] == [[STEPS]] * len(ranks)
    assert (incident["rank"], incident["cause"]) == (1, "transient_fault")
    assert incident["did"] == "the step was computed again"


@pytest.mark.parametrize("kind", [kind for kind, _ in cells((*KINDS, *FOUR), "optimizer")])
def test_an_update_that_harms_one_rank_is_undone_on_all(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """All are as if they had begun after it: the only snapshot is that of the beginning."""
    found = found_in(request, kind)
    ranks = of(found, kind, fault="optimizer", on_nan="recover")
    reference = of(found, kind, **AFTERWARDS)
    incident = told_together(ranks)
    assert [each["weights"] for each in ranks] == [each["weights"] for each in reference]
    assert [each["updates"] for each in ranks] == [[2]] * len(ranks)
    assert incident["rank"] == 1
    assert incident["did"].startswith("the state of 5 good steps before was put back")


@pytest.mark.parametrize(("kind", "how"), richer(FOUR, FOUR if IS_PROOF else ()))
def test_a_healthy_run_of_four_is_byte_identical(
    of_four: dict[str, list[Any]], kind: str, how: dict[str, Any]
) -> None:
    assert_byte_identical(of_four, kind, **how)
    if IS_PROOF:
        assert_byte_identical(of_four, kind)


STOPPED = cells(("ddp", "fsdp2", "pipeline"), "forward") + [("fsdp2", "stuck")]
OURS = {"on_nan": "recover", "ours": True}


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    scenes: list[Scene] = [(k, {"steps": STEPS, "fault": f, "on_nan": "stop"}) for k, f in STOPPED]
    scenes += [("fsdp2", {"steps": STEPS, "fault": "forward", "on_nan": "warn"})]
    for kind, fault in (("fsdp2", "backward"), ("fsdp2", "flip"), ("fsdp2-fp16", "flip")):
        scenes += [(kind, {"steps": STEPS, "fault": fault, **OURS})]
    scenes += [("fsdp2", {"steps": STEPS, "skips": True}), ("fsdp2", {"steps": STEPS})]
    scenes += [("fsdp2-fp16", {"steps": STEPS})]
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


def test_a_step_of_ours_finds_the_line_beyond_the_reduction(more: dict[str, list[Any]]) -> None:
    ranks = of(more, "fsdp2", steps=STEPS, fault="backward", **OURS)
    reference = of(more, "fsdp2", steps=STEPS, skips=True)
    assert [each["weights"] for each in ranks] == [each["weights"] for each in reference]
    incident = told_together(ranks)
    assert (incident["rank"], incident["code"], incident["module"]) == (1, BACKWARD_LINE, "gate")


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2-fp16"])
def test_a_step_of_ours_with_a_flipped_bit_is_computed_again(
    more: dict[str, list[Any]], kind: str
) -> None:
    ranks = of(more, kind, steps=STEPS, fault="flip", **OURS)
    clean = of(more, kind, steps=STEPS)
    assert [each["weights"] for each in ranks] == [each["weights"] for each in clean]
    incident = told_together(ranks)
    assert (incident["rank"], incident["cause"]) == (1, "transient_fault")
