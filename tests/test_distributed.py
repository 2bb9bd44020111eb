"""agree(): one answer for all, asked of real processes that talk over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import answers

from stayfinite.distributed import agree, rank, world_size

FLAGS = """
said = {
    "nobody": agree(False),
    "everybody": agree(True),
    "rank 0": agree(me == 0),
    "rank 1": agree(me == 1),
    "tensor": agree(torch.tensor(me == 1)),
    "number": agree(torch.tensor([0.0, 0.5][me], requires_grad=True)),
    "one element": agree(torch.tensor([me == 0])),
    "not a number": agree(torch.tensor([float("nan"), 0.0][me])),
}
"""


def test_ranks_agree_when_any_says_so(tmp_path: Path) -> None:
    first, second = answers(tmp_path, FLAGS)
    assert first == second
    assert first.pop("nobody") is False
    assert set(first.values()) == {True}


def test_ranks_agree_over_the_default_backends(tmp_path: Path) -> None:
    """Without a name torch takes one backend for each kind of device."""
    said = answers(tmp_path, "said = [agree(me == 1), agree(False)]", how="None")
    assert said == [[True, False]] * 2


def test_the_given_tensor_is_not_written_to(tmp_path: Path) -> None:
    body = "flag = torch.tensor(me, dtype=torch.int32); agree(flag); said = flag.item()"
    assert answers(tmp_path, body) == [0, 1]


def test_a_rank_alone_needs_no_collective(tmp_path: Path) -> None:
    assert answers(tmp_path, "said = [agree(True), rank(), world_size()]", world=1) == [
        [True, 0, 1]
    ]


@pytest.mark.parametrize("flag", [True, False])
def test_alone_the_answer_is_the_flag(flag: bool) -> None:
    assert not dist.is_initialized()
    assert agree(flag) is flag
    assert agree(torch.tensor(flag)) is flag
    assert (rank(), world_size()) == (0, 1)
