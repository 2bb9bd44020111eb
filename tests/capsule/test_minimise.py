"""The smallest repro: one operation, few numbers, a script that shows the same kind of value."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capsules import small_capsule
from click.testing import CliRunner
from torch import Tensor, nn

import stayfinite
from stayfinite.capsule import write_capsule
from stayfinite.capsule.file import Birth, Capsule, CodeReference, Operation
from stayfinite.capsule.make import birth_of
from stayfinite.capsule.minimal import Repro, minimise, operator
from stayfinite.cli import main
from stayfinite.errors import CapsuleError
from stayfinite.living import leaves_of
from stayfinite.locate.capture import KeptCalls
from stayfinite.locate.provenance import ancestors, guilty
from stayfinite.locate.tracer import Tracer
from stayfinite.records import Incident, NaNType


def traced_birth(compute: Callable[[], Tensor], *, with_data: bool) -> Birth:
    """What the tracer keeps of the first bad operation in this computation."""
    with Tracer(kept=KeptCalls()) as tracer:
        result = compute()
        with tracer.paused():
            noticed = [result]
            if result.requires_grad and result.isfinite().all():
                leaves = leaves_of([result])
                noticed = []
        if not noticed:
            result.backward()
            noticed = [leaf.grad for leaf in leaves if leaf.grad is not None]
        event = guilty(ancestors(tracer.events_of(noticed)))
        assert event is not None
        birth = birth_of(tracer.kept.of(event), with_data=with_data)
    assert birth is not None
    return birth


def repro_of(birth: Birth) -> Repro:
    code = CodeReference(kind="script")
    return minimise(Capsule(incident=Incident(step=0), code=code, birth=birth))


def run(text: str) -> tuple[int, str]:
    """The script's exit code and what it prints; here, since importing torch takes seconds."""
    lines: list[str] = []
    space: dict[str, Any] = {"print": lambda *words: lines.append(" ".join(map(str, words)))}
    try:
        exec(compile(text, "repro.py", "exec"), space)
    except SystemExit as ending:
        return int(str(ending.code)), "\n".join(lines)
    return 0, "\n".join(lines)


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def at(value: Tensor, *places: int, to: float) -> Tensor:
    value.data.view(-1)[list(places)] = to
    return value


def layer_norm() -> Tensor:
    values = at(torch.randn(6, 32) * 1e20, 40, to=3e38)
    return nn.functional.layer_norm(values.requires_grad_(), (32,)).sum()


FORWARD: dict[str, Callable[[], Tensor]] = {
    "log of zero": lambda: at(torch.rand(7, 9) + 1, 30, to=0).log().sum(),
    "division": lambda: (torch.ones(5, 4) / at(torch.rand(4) + 1, 2, to=0)).sum(),
    "zero by zero": lambda: (at(torch.rand(4, 1), 1, to=0) / at(torch.rand(6), 2, to=0)).sum(),
    "exp": lambda: at(torch.randn(3, 50), 77, to=200).exp().mean(),
    "masked rows": lambda: (
        torch.randn(5, 6).masked_fill(torch.arange(30).view(5, 6) // 6 == 2, -torch.inf).softmax(1)
    ),
    "half mm": lambda: torch.full((4, 300), 20.0).half() @ torch.full((300, 5), 20.0).half(),
    "sum": lambda: (torch.full((6, 8), 1e38)).sum(1),
    "variance": lambda: at(torch.randn(4, 30), 3, 4, to=3e38).var(dim=1),
    "power": lambda: at(torch.rand(30) + 1, 4, to=-2) ** 0.5,
    "negative root": lambda: at(torch.rand(2, 3, 4) + 1, 11, to=-1).sqrt(),
    "empty mean": lambda: torch.empty(0).mean(),
    "infinities": lambda: torch.full((3,), torch.inf) - torch.full((3, 3), torch.inf),
    "cat then norm": layer_norm,
    "integer power": lambda: torch.full((4,), 1e30).pow(2),
    "arc": lambda: at(torch.rand(40), 9, to=1.5).acos(),
    "convolution": lambda: nn.functional.conv1d(
        torch.full((2, 3, 20), 1e20), torch.full((4, 3, 5), 1e20)
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_operation_is_cut_down_and_stays_bad(name: str) -> None:
    torch.manual_seed(0)
    birth = traced_birth(lambda: FORWARD[name]().sum(), with_data=True)
    check(birth, repro_of(birth))


def check(birth: Birth, repro: Repro) -> None:
    code, printed = run(repro.text)
    assert code == 1, repro.text
    assert birth.nan_type.word.lower() in printed
    assert repro.text.count("\n") <= 40
    assert repro.numbers <= max(4, repro.numbers_before)


BACKWARD: dict[str, Callable[[], Tensor]] = {
    "root": lambda: at(weights(6, 5).abs().detach(), 8, to=0).requires_grad_().sqrt().sum(),
    "norm": lambda: at(weights(6, 4), 4, 5, 6, 7, to=0).square().sum(1).sqrt().sum(),
    "power": lambda: at(weights(9), 2, to=0).abs().detach().requires_grad_().pow(0.3).sum(),
    "hidden log": lambda: _hidden_log(),
    "arc sine": lambda: at(torch.rand(30) / 2, 7, to=1).requires_grad_().asin().sum(),
}


TOO_FINE = ("variance",)
"""It takes several different numbers in one tensor, or the right gradient."""


def _hidden_log() -> Tensor:
    values = at(torch.rand(8) + 1, 3, to=0).requires_grad_()
    return torch.where(values > 0, values.log(), torch.zeros(())).sum()


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_origin_runs_the_forward_operation_and_its_backward(name: str) -> None:
    torch.manual_seed(0)
    birth = traced_birth(BACKWARD[name], with_data=True)
    repro = repro_of(birth)
    check(birth, repro)
    if birth.forward is not None:
        assert ".backward(gradient)" in repro.text
        assert repro.numbers <= 12


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_without_consent_statistics_are_enough_or_it_says_so(name: str) -> None:
    torch.manual_seed(0)
    compute = {**FORWARD, **BACKWARD}[name]
    birth = traced_birth(lambda: compute().sum(), with_data=False)
    assert not any(isinstance(each, Tensor) for each in birth.operation.arguments.values())
    if name in TOO_FINE:
        with pytest.raises(CapsuleError, match="stays finite"):
            repro_of(birth)
    else:
        check(birth, repro_of(birth))


def test_update_of_an_optimizer_is_kept_as_it_was_before() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.full((40,), 1.0, dtype=torch.float16))
    optimizer = torch.optim.Adam([weight], eps=1e-8, foreach=False)
    with Tracer(kept=KeptCalls()) as tracer:
        weight.grad = at(torch.full((40,), 1e-3), 5, to=1e-7).half()
        optimizer.step()
        event = guilty(ancestors(tracer.events_of([weight])))
        assert event is not None
        birth = birth_of(tracer.kept.of(event), with_data=False)
    assert birth is not None
    assert birth.operation.op == "aten.addcdiv_.default"
    assert torch.equal(birth.operation.arguments["self"], torch.ones(40).half())
    repro = repro_of(birth)
    check(birth, repro)
    assert repro.numbers == 3


def test_lists_lose_the_members_that_do_not_matter() -> None:
    members = [torch.ones(3), torch.ones(2), torch.full((4,), 1e38)]
    operation = Operation(op="aten._foreach_mul.Scalar", arguments={"self": members, "scalar": 1e5})
    repro = repro_of(Birth(operation=operation, nan_type=NaNType.POS_INF))
    assert run(repro.text)[0] == 1
    assert repro.numbers == 1


@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default", "aten.save.default", "aten.save", "prims.sin.default", "",
        "aten.log", "aten.log.nothing", "aten.__class__.__init__", "aten.log.default; import os",
        "aten.randn.default", "aten.set_.source_Storage", "aten._print.default",
    ],
)  # fmt: skip
def test_operators_that_do_more_are_never_run(name: str) -> None:
    with pytest.raises(CapsuleError):
        operator(name)


def test_operation_with_a_huge_result_is_not_run() -> None:
    operation = Operation(
        op="aten.repeat.default", arguments={"self": torch.ones(4), "repeats": [1 << 40]}
    )
    with pytest.raises(CapsuleError, match="it is not run"):
        repro_of(Birth(operation=operation, nan_type=NaNType.NAN))


def test_text_of_a_capsule_stays_in_comments() -> None:
    birth = Birth(
        operation=Operation(op="aten.log.default", arguments={"self": torch.zeros(2)}),
        nan_type=NaNType.NEG_INF,
    )
    origin = stayfinite.Origin(phase="forward", file="a.py\nimport os; os.abort()#", line=1)
    capsule = Capsule(
        incident=Incident(step=0, origin=origin),
        code=CodeReference(kind="script"),
        birth=birth,
        versions={"torch": '2"""\nimport sys'},
    )
    code = [line for line in minimise(capsule).text.splitlines() if not line.startswith("#")]
    assert not any("os" in line or "sys" in line for line in code)


def test_command_writes_a_script_that_runs_alone(tmp_path: Path) -> None:
    write_capsule(tmp_path / "a.capsule", small_capsule())
    words = ["minimise", str(tmp_path / "a.capsule"), "-o", str(tmp_path / "repro.py")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    alone = subprocess.run(
        [sys.executable, "-I", tmp_path / "repro.py"], capture_output=True, text=True, timeout=60
    )
    assert alone.returncode == 1, alone.stderr
    assert "inf" in alone.stdout
    assert CliRunner().invoke(main, words).exit_code == 2  # it is there already
    assert CliRunner().invoke(main, [*words, "--force"]).exit_code == 0
    printed = CliRunner().invoke(main, words[:2])
    assert printed.output == (tmp_path / "repro.py").read_text()


def test_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.capsule").write_bytes(b"nonsense")
    done = CliRunner().invoke(main, ["minimise", str(tmp_path / "a.capsule")])
    assert done.exit_code == 2
    assert done.output.count("\n") == 1


def test_capsule_of_a_run_without_a_trace_says_how_to_make_a_better_one() -> None:
    capsule = Capsule(incident=Incident(step=3), code=CodeReference(kind="script"))
    with pytest.raises(CapsuleError, match="run --trace --capsule"):
        minimise(capsule)
