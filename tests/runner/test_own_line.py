"""An operation inside an installed package is reported at the user's own line that called it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stayfinite.records import Hop, Incident, Origin, RunResult, from_data
from stayfinite.report.terminal import as_text
from stayfinite.text import one_line

PACKAGE = """
    import torch

    def standardised(x, scale):
        spread = scale.sum(-1, keepdim=True)
        return x / spread

    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clamp(min=0).sqrt()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad / (2 * x.sqrt())

    class Table(torch.nn.Module):
        def __init__(self, steps):
            super().__init__()
            ends = torch.arange(steps).float()
            self.register_buffer("weight", ends / ends)

        def forward(self, x, at):
            return x * self.weight[at]
"""
TRAINING = """
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent / "env" / "site-packages"))
    import torch
    from torch import nn
    from probtools.dist import Root, Table, standardised

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    table = Table(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        scale = torch.ones(8, 4)
        if step == 4:
            scale[3] = 0
        out = model(torch.randn(8, 4))
        loss = {loss}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
LOSSES = {
    "forward": ("standardised(out, scale).pow(2).mean()", "dist.py", 6),
    "backward": ("Root.apply(out.pow(2) * scale).mean()", "dist.py", 17),
    "buffer": ("table(out, 4 - step).mean()", "dist.py", 23),
}
LINE = 19  # of the loss
MADE = 12  # of the table


def run(scripts: Any, loss: str, *options: str, env: dict[str, str] | None = None) -> Any:
    scripts.write(PACKAGE, "env/site-packages/probtools/dist.py")
    scripts.write("", "env/site-packages/probtools/__init__.py")
    scripts.write(TRAINING.format(loss=loss))
    options = ("--second-run", "never", "--json", "out.json", *options)
    return scripts.warm("train.py", options=options, env=env)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_place_is_the_users_line_and_the_packages_stands_under_it(
    scripts: Any, kind: str
) -> None:
    loss, file, line = LOSSES[kind]
    done = run(scripts, loss)
    origin = scripts.result()["incidents"][0]["origin"]
    own = MADE if kind == "buffer" else LINE
    assert (origin["file"], origin["line"]) == ("train.py", own), done.err.decode()
    inner = origin["facts"]["library"]
    assert inner["file"].endswith(f"site-packages/probtools/{file}")
    assert inner["line"] == line
    text = done.err.decode()
    assert f"--> train.py:{own}" in text
    assert f"in probtools/{file}:{line}" in text
    assert f"called from train.py:{own}" in " ".join(text.split())


def test_nobody_is_told_to_edit_a_package_and_no_change_of_it_is_offered(scripts: Any) -> None:
    done = run(scripts, LOSSES["forward"][0], "--prove", "10")
    diagnosis = scripts.result()["incidents"][0]["diagnosis"]
    assert diagnosis["cause"] == "division_by_zero"
    assert "change your own code, not the package" in diagnosis["fix"]
    assert "`standardised(out, scale)`" in diagnosis["fix"]
    assert "spread" not in diagnosis["fix"]
    assert "site-packages" not in (diagnosis["patch"] or "")
    assert diagnosis["confidence"] == "proven", done.err.decode()  # by the operation, kept inside


def test_all_surfaces_have_both_lines(scripts: Any) -> None:
    from stayfinite.report.html.page import page_of
    from stayfinite.report.store.reading import read_run

    run(scripts, LOSSES["forward"][0], "--run-dir", "recorded")
    found = from_data(RunResult, scripts.result()).incidents[0]
    inner = "in probtools/dist.py:6"
    assert one_line(found).endswith(f"at train.py:{LINE} ({inner})")
    page = page_of(read_run(scripts.folder / "recorded"))
    shown = re.sub(r"<[^>]+>", "", page)
    assert f"train.py:{LINE}" in shown
    assert f"{inner} (standardised), called from train.py:{LINE}" in shown


WIDE = ("folder with spaces/" * 3 + "a very long name of a script.py", "x" * 70 + ".py")


@pytest.mark.parametrize("file", ["train.py", *WIDE])
@pytest.mark.parametrize("width", [30, 60, 80, 100])
def test_a_file_and_its_line_are_never_on_two_lines(
    monkeypatch: pytest.MonkeyPatch, file: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    hop = Hop(kind="birth", op="aten.log.default", phase="forward", file=file, line=1234)
    inner = {"file": f"/env/site-packages/pkg/{'deep/' * 12}{'y' * 30}.py", "line": 98765}
    origin = Origin(
        phase="forward", op="aten.log.default", file=file, line=1234, lineage=(hop, hop),
        exact=True, facts={"library": inner},
    )  # fmt: skip
    text = as_text(Incident(step=3, origin=origin), verbose=True)
    lines = text.splitlines()
    assert any(f"{file}:1234" in line for line in lines)
    assert any(f"pkg/{'deep/' * 12}{'y' * 30}.py:98765" in line for line in lines)
    assert any(
        f"at {Path(file).name}:1234" in line or Path(file).name + ":1234" in line for line in lines
    )
    prose = [line for line in lines if ":1234" not in line and ":98765" not in line]
    assert all(len(line) <= width for line in prose), text


BAYES = """
    def terms_of(net, batches):
        for x in batches:
            yield [net(x).square().sum().neg(), net(x).square().log().sum()]

    def total_of(terms):
        read = total = 0
        for term in terms:
            read += term.item()
            total = total + term
        return total

    def fit(net, optimizer, batches):
        for terms in terms_of(net, batches):
            total = total_of(terms)
            for loss in [-total]:
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
"""
FITTED = """
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent / "env" / "site-packages"))
    import torch
    from probtools.bayes import fit

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(6):
        x = torch.randn(8, 4)
        if step == 4:
            x[3] = 0
        fit(net, optimizer, [x])
"""


def test_a_value_that_a_package_reads_and_then_trains_on_is_told_once(scripts: Any) -> None:
    """The packages' loops begin when it is there already, so the user's own loop is run again."""
    scripts.write(BAYES, "env/site-packages/probtools/bayes.py")
    scripts.write("", "env/site-packages/probtools/__init__.py")
    scripts.write(FITTED)
    done = scripts.warm("train.py", options=("--second-run", "never", "--json", "out.json"))
    (incident,) = scripts.result()["incidents"]
    origin = incident["origin"]
    assert (origin["file"], origin["line"]) == ("train.py", 16), done.err.decode()
    assert origin["op"] == "aten.log.default"
    assert incident["diagnosis"]["cause"] == "log_of_zero"
    assert incident["outcome"]["detail"] == "the backward pass was not run"
