"""A test marked `finite` fails by our report when a bad value mattered, and only then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import forks
import pytest

PLUGIN = "stayfinite.integrations.pytest_plugin"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of the file below; all of it is run once."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_ours.py").write_text(TESTS)
    done = forks.run_text([*command(), "-rA", "test_ours.py"], cwd=folder)
    return done.stdout + done.stderr


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *command(), *arguments]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)


def command() -> list[str]:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return words if _is_installed() else [*words, "-p", PLUGIN]


def _is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(each.value == PLUGIN for each in entry_points(group="pytest11"))


TESTS = """
import cProfile
import pytest
import torch


def loss_of(x):
    return torch.log(x).sum()


@pytest.mark.finite
def test_bad_variable():
    loss = loss_of(torch.zeros(2))
    assert loss.shape == ()


@pytest.mark.finite
def test_bad_gradient():
    x = torch.zeros(2, requires_grad=True)
    torch.sqrt(x).sum().backward()


def test_bad_value_is_checked_at_once(finite):
    finite(loss_of(torch.ones(2)))
    finite(loss_of(-torch.ones(2)), "loss")
    raise AssertionError("not reached")


@pytest.mark.finite
def test_good_mask():
    scores = torch.zeros(3).masked_fill(torch.tensor([True, False, False]), float("-inf"))
    weights = torch.softmax(scores, 0)
    assert weights.sum() == 1


@pytest.mark.finite
def test_good_where():
    x = torch.tensor([0.0, 1.0])
    logs = torch.where(x > 0, torch.log(x), torch.zeros(2))


@pytest.mark.finite
@pytest.mark.parametrize("number", [1.0, 2.0])
def test_good_numbers(number):
    assert loss_of(torch.tensor([number])).item() >= 0


def test_unmarked():
    loss = loss_of(torch.zeros(2))


@pytest.mark.finite
def test_own_failure():
    assert loss_of(torch.ones(2)) == 1


class TestInside:
    @pytest.mark.finite
    def test_bad_in_a_class(self):
        ratio = torch.zeros(1) / torch.zeros(1)
"""


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("test_bad_variable", "log_of_zero"),
        ("test_bad_gradient", "sqrt_grad_at_zero"),
        ("test_bad_value_is_checked_at_once", "log_of_negative"),
        ("TestInside::test_bad_in_a_class", "division_by_zero"),
    ],
)
def test_bad_one_fails_with_a_report(outcome: str, name: str, cause: str) -> None:
    assert f"FAILED test_ours.py::{name}" in outcome
    assert cause in outcome
    assert "not reached" not in outcome


@pytest.mark.parametrize(
    "name", ["test_good_mask", "test_good_where", "test_good_numbers[1.0]", "test_unmarked"]
)
def test_good_one_passes(outcome: str, name: str) -> None:
    assert f"PASSED test_ours.py::{name}" in outcome


def test_failure_of_its_own_stays_what_it_is(outcome: str) -> None:
    assert "assert tensor(0.) == 1" in outcome


def test_mark_is_known(tmp_path: Path) -> None:
    assert "finite: fail when" in run(tmp_path, "--markers").stdout


def test_loading_the_plugin_does_not_load_torch(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n    assert 'torch' not in sys.modules\n"
    )
    assert run(tmp_path, "test_it.py").returncode == 0
