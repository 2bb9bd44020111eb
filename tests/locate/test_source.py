"""Columns, lines and functions of the user's own code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from scenes import guilty, origin, run_file
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional

from stayfinite.locate import source

ZERO = torch.zeros(3)

NON_ASCII = """
def bestimme(größe, π):
    überlauf = {"ключ": π}; ergebnis = größe + torch.log(überlauf["ключ"]); return ergebnis
"""


def test_columns_count_characters_and_not_bytes(tmp_path: Path) -> None:
    script = run_file(tmp_path / "größe.py", NON_ASCII)
    found = origin(lambda: script["bestimme"](1.0, ZERO))
    line = NON_ASCII.splitlines()[2]
    assert found.line == found.end_line == 3
    assert line[slice(*found.columns)] == 'torch.log(überlauf["ключ"])'
    assert found.code == line.strip()
    assert found.function == "bestimme"


def test_emoji_before_the_expression_do_not_move_the_columns(tmp_path: Path) -> None:
    text = "def f(x):\n    return ('🔥🔥', torch.log(x))[1]\n"
    script = run_file(tmp_path / "fire.py", text)
    found = origin(lambda: script["f"](ZERO))
    assert text.splitlines()[1][slice(*found.columns)] == "torch.log(x)"


def test_expression_over_several_lines_has_its_first_and_last() -> None:
    def step() -> Tensor:
        return torch.log(
            ZERO
            * 2.0
        )  # fmt: skip

    found = origin(step)
    assert found.end_line - found.line == 3
    assert found.code == "return torch.log("
    assert found.facts["expression"] == "torch.log(ZERO * 2.0)"


def test_one_operation_of_a_long_line_is_pointed_at() -> None:
    def step() -> Tensor:
        return (ZERO + 1.0) * torch.sqrt(ZERO) + 1.0 / ZERO - torch.exp(ZERO)

    assert guilty(step) == "1.0 / ZERO"


def test_lambda_and_comprehension_are_places_too() -> None:
    double = lambda x: torch.log(x)  # noqa: E731
    assert guilty(lambda: double(ZERO)) == "torch.log(x)"
    assert guilty(lambda: [torch.log(x) for x in ZERO].pop()) == "torch.log(x)"
    assert guilty(lambda: sum(1 / x for x in ZERO)) == "1 / x"


def test_operation_inside_torch_is_placed_at_the_call() -> None:
    found = origin(lambda: functional.kl_div(ZERO, torch.full((3,), 1e38) * 1e38, reduction="sum"))
    assert found.facts["expression"] is not None
    normal = origin(lambda: Normal(0.0, ZERO, validate_args=False).log_prob(torch.ones(3)))
    assert "log_prob" in normal.facts["expression"]
    assert normal.facts["inside"].startswith("distributions/normal.py")


def test_operators_methods_and_subscripts_have_their_own_text() -> None:
    table = torch.zeros(2, 3)
    assert guilty(lambda: table[0].log()) == "table[0].log()"
    assert guilty(lambda: ZERO**-1) == "ZERO**-1"

    def in_place() -> Tensor:
        y = torch.ones(3)
        y /= ZERO
        return y

    assert guilty(in_place) == "y /= ZERO"


def test_code_without_a_file_has_a_line_but_no_text() -> None:
    variables = {"torch": torch}
    exec(compile("def f(x):\n    return torch.log(x)", "<string>", "exec"), variables)
    found = origin(lambda: variables["f"](ZERO))
    assert (found.file, found.line, found.code) == ("<string>", 2, "")
    assert found.function == "f"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (torch.nn.functional.__file__, source.INTERNAL),
        (source.__file__, source.INTERNAL),
        (json.__file__, source.INTERNAL),
        ("<frozen importlib._bootstrap>", source.INTERNAL),
        (__file__, source.USER),
        ("<stdin>", source.USER),
        ("<ipython-input-3>", source.USER),
        (pytest.__file__, source.USER),
    ],
)
def test_code_is_the_users_unless_it_is_torchs_pythons_or_ours(path: str, kind: int) -> None:
    assert source.kind_of(compile("0", path, "exec")) == kind


def test_copy_of_a_torch_file_is_the_users(tmp_path: Path) -> None:
    text = "def f(x):\n    return x.log()\n"
    inside = compile(text, torch.nn.functional.__file__, "exec")
    assert source.kind_of(inside) == source.INTERNAL
    script = run_file(tmp_path / "functional.py", text)
    assert guilty(lambda: script["f"](ZERO)) == "x.log()"


def test_engine_is_recognised_by_its_function() -> None:
    code = torch.autograd.graph._engine_run_backward.__code__
    assert source.kind_of(code) == source.ENGINE


@pytest.mark.parametrize(
    ("path", "folder", "shown"),
    [
        ("{here}/train.py", "{here}", "train.py"),
        ("{here}/src/model.py", "{here}", "src/model.py"),
        ("{here}/train.py", None, "{here}/train.py"),
        ("{here}-else/train.py", "{here}", "{here}-else/train.py"),
        ("<stdin>", "{here}", "<stdin>"),
    ],
)
def test_file_is_relative_to_the_folder_it_is_in(
    path: str, folder: str | None, shown: str, tmp_path: Path
) -> None:
    here = str(tmp_path)
    given = folder.format(here=here) if folder else None
    assert source.relative(path.format(here=here), given) == shown.format(here=here)


def test_link_to_the_folder_is_seen_through(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    path = str(tmp_path / "link" / "train.py")
    assert source.relative(path, str(tmp_path / "real")) == "train.py"


def test_place_of_a_frame_is_the_innermost_user_frame() -> None:
    place = source.user_place(sys._getframe())
    assert place is not None
    assert place.code is sys._getframe().f_code
    span = source.resolve(place, folder=None)
    assert (span.file, span.function) == (
        __file__,
        "test_place_of_a_frame_is_the_innermost_user_frame",
    )
    assert source.user_place(None) is None


def test_optimizer_is_recognised_but_not_its_closure() -> None:
    assert not source.in_optimizer(sys._getframe())
    seen = []
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.step(lambda: seen.append(source.in_optimizer(sys._getframe())))
    assert seen == [False]


class Own(torch.optim.Optimizer):
    def step(self, closure: object = None) -> bool:
        return source.in_optimizer(sys._getframe())


def test_optimizer_that_a_user_wrote_is_recognised() -> None:
    assert Own([torch.ones(2, requires_grad=True)], {}).step() is True
