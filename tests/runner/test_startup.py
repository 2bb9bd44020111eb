"""A healthy run imports no more of torch than the script does, and of us only what watches."""

from __future__ import annotations

TRAINS = """
import sys
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
before = set(sys.modules)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
late = [name for name in set(sys.modules) - before if name.startswith("stayfinite")]
assert not late, late  # a step would wait for it
"""
WATCHES = TRAINS.replace(
    "before =", "import stayfinite\nguard = stayfinite.watch(model, optimizer)\nbefore ="
)
HEAVY = {"torch", "sympy", "mpmath", "rich", "jinja2", "pygments", "starlette", "uvicorn"}
FOR_INCIDENTS = (
    "stayfinite.capsule",
    "stayfinite.checkpoint",
    "stayfinite.explain.experiments",
    "stayfinite.patch",
    "stayfinite.explain.rules",
    "stayfinite.guard.replay",
    "stayfinite.locate.tracer",
    "stayfinite.report.html",
    "stayfinite.runner.prove",
)


def imports_of(start, *words, **how):
    """All that the process imported, from its beginning to its very end."""
    done = start(*words, env={"PYTHONPROFILEIMPORTTIME": "1"}, **how)
    assert done.code == 0, done.err.decode()
    lines = [line for line in done.err.decode().splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


def too_much(added):
    """Modules that a healthy run has no need of."""
    return sorted(n for n in added if n.partition(".")[0] in HEAVY or n.startswith(FOR_INCIDENTS))


def test_script_that_only_imports_torch_gets_no_more_of_it(scripts):
    scripts.write("import torch")
    plain = imports_of(scripts.plain, "train.py")
    watched = imports_of(scripts.watched, "train.py")
    assert "torch._dynamo" not in plain
    assert "stayfinite.guard.answers" in watched
    assert too_much(watched - plain) == []


def test_training_that_stays_finite_imports_no_more_of_torch(scripts):
    scripts.write(TRAINS)
    plain = imports_of(scripts.plain, "train.py")
    for options in ([], ["--on-nan", "recover"]):
        assert too_much(imports_of(scripts.watched, "train.py", options=options) - plain) == []
    scripts.write(WATCHES, "watches.py")
    assert too_much(imports_of(scripts.plain, "watches.py") - plain) == []
