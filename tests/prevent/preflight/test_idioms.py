"""Losses as people write them: a risky line is flagged with its cause, and safe ones are quiet."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from idioms import RISKY, SAFE, Given, Idiom
from torch import nn

from stayfinite.prevent.preflight.preflight import preflight
from stayfinite.prevent.risks import Risk


def warnings_of(idiom: Idiom) -> list[Risk]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16))
    found = preflight(net, batch=(torch.randn(32, 20), Given()), loss_fn=idiom)
    return [risk for risk in found if risk.is_warning]


def guilty_line(idiom: Idiom) -> str:
    lines, first = inspect.getsourcelines(idiom)
    number = next(i for i, line in enumerate(lines) if line.rstrip().endswith("# guilty"))
    file = Path(os.path.relpath(inspect.getsourcefile(idiom) or ""))
    return f"{file if not str(file).startswith('..') else file.resolve()}:{first + number}"


@pytest.mark.parametrize("idiom", RISKY, ids=lambda idiom: idiom.__name__)
def test_a_risky_line_is_flagged_with_its_cause(idiom: Idiom) -> None:
    found = [(risk.where, risk.cause) for risk in warnings_of(idiom)]
    assert (guilty_line(idiom), RISKY[idiom]) in found


@pytest.mark.parametrize("idiom", SAFE, ids=lambda idiom: idiom.__name__)
def test_a_safe_loss_has_no_warning(idiom: Idiom) -> None:
    assert warnings_of(idiom) == []


def test_every_warning_has_a_fix_and_evidence() -> None:
    found: list[Any] = [risk for idiom in list(RISKY)[:6] for risk in warnings_of(idiom)]
    assert all(risk.fix.strip() and risk.evidence for risk in found)
