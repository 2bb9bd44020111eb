"""Facts about the inputs of a bad operation, in the user's terms, from whole scripts."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import forks
import pytest

START = """
import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    x = torch.rand(6, 4)
"""
END = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCRIPTS = {
    "labels": (
        """
        y = torch.randint(0, 4, (6,))
        if step == 2:
            y[:] = -100
        loss = F.cross_entropy(model(x), y)
        """,
        "all 6 labels of this batch are -100 (ignore_index)",
    ),
    "class weight": (
        """
        y = torch.randint(0, 4, (6,))
        if step == 2:
            y[:] = 3
        loss = F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 1.0, 1.0, 0.0]))
        """,
        "all labels of this batch are of class 3, whose weight is 0",
    ),
    "mask": (
        """
        scores = model(x) @ model(x).T
        mask = torch.zeros(6, 6, dtype=torch.bool)
        mask[3] = step == 2
        loss = (scores.masked_fill(mask, -torch.inf).softmax(-1) @ x).pow(2).mean()
        """,
        "the mask hides every key of row 3: all 6 scores are -Inf (of 6)",
    ),
    "one sample": (
        """
        if step == 3:
            x = x[:1]
        out = model(x)
        loss = ((out - out.mean(0)) / (out.std(0) + 1e-5)).mean()
        """,
        "this batch has one sample: `out` has the shape [1, 4]",
    ),
    "empty class": (
        """
        y = torch.tensor([0, 1, 2, 0, 1, 2]) % (3 if step < 2 else 2)
        loss = sum(model(x)[y == c].mean() for c in range(3))
        """,
        "`y == c` (c is 2) selects nothing: the shape is [0, 4]",
    ),
    "empty mask": (
        """
        keep = (torch.arange(6) < (0 if step == 2 else 4)).float()
        loss = (model(x).mean(1) * keep).sum() / keep.sum()
        """,
        "`keep.sum()` is 0: nothing is counted",
    ),
    "denominator": (
        """
        width = torch.ones(6)
        if step == 2:
            width[[1, 4]] = 0
        loss = (model(x).mean(1) / width).mean()
        """,
        "`width` is 0 at 2 of 6 elements, first at [1]",
    ),
    "zero row": (
        """
        if step == 2:
            x[5] = 0
        unit = x / x.norm(dim=-1, keepdim=True)
        loss = model(unit).pow(2).mean()
        """,
        "row 5 of `x` is all 0 (1 of 6 rows)",
    ),
    "reward": (
        """
        played = numpy.ones(6, numpy.float32)
        with numpy.errstate(divide="ignore"):
            played[4] = played[4] / numpy.float32(step != 2)
        reward = torch.from_numpy(played)
        loss = -(model(x).log_softmax(-1)[:, 0] * reward).mean()
        """,
        "`reward` is Inf at 1 of 6 elements, first at [4]",
    ),
    "target": (
        """
        y = torch.rand(6, 4).numpy()
        if step == 2:
            y[2, 1] = float("nan")
        y = torch.from_numpy(y)
        loss = F.mse_loss(model(x), y)
        """,
        "`y` is NaN at 1 of 24 elements, first at [2, 1]",
    ),
    "column": (
        """
        table = torch.rand(6, 4).numpy()
        if step == 2:
            table[:, 1] /= 0 * table[:, 1].std()
        y = torch.from_numpy(table)
        loss = F.mse_loss(model(x), y)
        """,
        "`y` is Inf in all of `y[:, 1]`, and nowhere else",
    ),
    "logarithm": (
        """
        p = x.clone()
        if step == 2:
            p[0, 3] = 0
        loss = -(model(x).softmax(-1) * torch.log(p)).sum()
        """,
        "`p` is 0 at 1 of 24 elements, first at [0, 3]",
    ),
    "square root": (
        """
        value = x.mean(1) - (0.9 if step == 2 else 0)
        loss = (model(x).mean(1) * value.sqrt()).mean()
        """,
        "`value` is negative at",
    ),
    "exponent": (
        """
        shift = 200.0 if step == 2 else 0.0
        logits = model(x) + shift
        loss = torch.exp(logits).mean()
        """,
        "`logits` is above 88.7 at all 24 elements; the largest is 20",
    ),
    "angle": (
        """
        cosine = F.normalize(model(x), dim=-1).sum(-1) * 0.1
        if step == 2:
            cosine = cosine + 1.2
        loss = torch.acos(cosine).mean()
        """,
        "`cosine` is outside of -1 to 1 at",
    ),
    "alignment": (
        """
        frames = model(torch.rand(5, 2, 4)).log_softmax(-1)
        lengths = torch.tensor([2, 4 if step == 2 else 2])
        labels = torch.tensor([[1, 2, 0, 0], [3, 3, 3, 1]])
        loss = F.ctc_loss(frames, labels, torch.tensor([5, 5]), lengths)
        """,
        "target 1 has 4 labels and 2 repeats, so it needs 6 frames; its input has 5",
    ),
    "float16": (
        """
        big = (x * (1e4 if step == 2 else 1)).half()
        loss = (model(x).half() * 8 + big).pow(2).float().mean()
        """,
        "the limit of float16",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_report_says_what_was_measured(name: str, tmp_path: Path) -> None:
    body, said = SCRIPTS[name]
    script = tmp_path / "train.py"
    script.write_text(START + textwrap.indent(textwrap.dedent(body), "    ") + END)
    code = "from stayfinite.cli import main\nmain(prog_name='stayfinite')"
    options = ["--second-run", "never", "--prove", "0", "--no-record", "--json", "out.json"]
    env = {**os.environ, "PYTHONPATH": forks.SOURCE, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = forks.run(["-c", code, "run", *options, "train.py"], cwd=tmp_path, env=env, timeout=120)
    (incident, *_) = json.loads((tmp_path / "out.json").read_text())["incidents"]
    evidence = incident["diagnosis"]["evidence"]
    assert any(said in each for each in evidence), (evidence, done.stderr.decode())
    assert said in done.stderr.decode()


def test_a_column_that_is_bad_in_every_row_is_no_bad_sample(tmp_path: Path) -> None:
    body, _ = SCRIPTS["column"]
    script = tmp_path / "train.py"
    script.write_text(START + textwrap.indent(textwrap.dedent(body), "    ") + END)
    options = ["--second-run", "never", "--prove", "0", "--no-record", "--json", "out.json"]
    forks.run(["-m", "stayfinite", "run", *options, "train.py"], cwd=tmp_path, timeout=120)
    (incident, *_) = json.loads((tmp_path / "out.json").read_text())["incidents"]
    diagnosis = incident["diagnosis"]
    assert diagnosis["cause"] == "bad_input_data"
    assert "in every row" in diagnosis["why"]
    assert "normalised" in diagnosis["fix"]
