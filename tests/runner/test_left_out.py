"""A loss that the script itself does not train on has its line all the same."""

from __future__ import annotations

import pytest

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.rand(32, 4) + 0.1
x[17] = 0
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(net.parameters())
log = open("log.txt", "w", buffering=1)


def batch_loss(batch):
    loss = (net(batch) - torch.log(batch)).square().mean()
    IN_STEP
    return loss


def train():
    for number, (batch,) in enumerate(DataLoader(TensorDataset(x), batch_size=4)):
        loss = batch_loss(batch)
        log.write(f"{number} {loss.item()}\\n")
        if not torch.isfinite(loss):
            AT_ONCE
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


train()
"""
LINE = 15


@pytest.mark.parametrize(
    ("at_once", "code", "said"),
    [
        ("continue", 0, "1 loss not finite, skipped by the script itself"),
        ("break", 0, "1 loss not finite, skipped by the script itself"),
        ("return", 0, "1 loss not finite, skipped by the script itself"),
        ("raise ValueError(number)", 1, "ended itself with exit code 1"),
        ("sys.exit(7)", 7, "ended itself with exit code 7"),
        ("assert torch.isfinite(loss)", 1, "ended itself with exit code 1"),
    ],
)
def test_its_line_is_named_and_the_run_is_not_called_finite(scripts, at_once, code, said):
    scripts.write(SCRIPT.replace("IN_STEP", "pass").replace("AT_ONCE", at_once))
    plain = scripts.alone("train.py")
    log = (scripts.folder / "log.txt").read_text()
    done = scripts.warm("train.py", options=("--json", "out.json", "--second-run", "never"))
    (incident,) = scripts.result()["incidents"]
    assert (incident["step"], incident["origin"]["line"], incident["origin"]["exact"]) == (
        4,
        LINE,
        True,
    )
    assert done.code == plain.code == code
    assert said.encode() in done.err
    assert b"all finite" not in done.err
    assert (scripts.folder / "log.txt").read_text() == log


WITHOUT_A_LOADER = """
import sys
import torch

torch.manual_seed(0)
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(net.parameters())


def step(batch):
    loss = (net(batch) - torch.log(batch)).square().mean()
    if not torch.isfinite(loss):
        raise ArithmeticError(f"loss {loss.item()}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def batches():
    for number in range(8):
        yield torch.full((3, 4), 0.0 if number in BAD else 0.5)


skipped = 0
for batch in batches():
    try:
        step(batch)
    except ArithmeticError:
        skipped += 1
        if skipped > 1:
            sys.exit("too many")
"""


@pytest.mark.parametrize(("bad", "code"), [((4,), 0), ((4, 5), 1), ((3, 6), 1)], ids=str)
def test_a_loss_that_a_loop_without_a_loader_skips_has_its_line(scripts, bad, code):
    scripts.write(WITHOUT_A_LOADER.replace("BAD", repr(bad)))
    never = ("--json", "out.json", "--second-run", "never", "--prove", "0")
    done = scripts.warm("train.py", options=never)
    incidents = scripts.result()["incidents"]
    found = [(each["origin"]["line"], each["origin"]["exact"]) for each in incidents]
    assert found == [(11, True)]  # of several, the first is reported
    assert incidents[0]["step"] == bad[0]
    assert done.code == code
    assert b"all finite" not in done.err


@pytest.mark.parametrize("place", ["BEFORE", "AFTER"])
def test_a_number_that_is_logged_beside_a_loss_is_no_incident(scripts, place):
    """A NaN that nothing is trained on, in each turn of a loop that trains."""
    text = """
        import torch

        torch.manual_seed(0)
        net = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(net.parameters())
        for step in range(6):
            out = torch.softmax(net(torch.ones(2, 4)) + torch.tensor([0, 0, 0, -1e9]), -1)
            loss = out.square().mean()
            BEFORE
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            AFTER
    """
    entropy = "entropy = -(out * out.log()).sum(-1).mean().item()"
    other = {"BEFORE": "AFTER", "AFTER": "BEFORE"}[place]
    scripts.write(text.replace(place, entropy).replace(other, "pass"))
    done = scripts.warm("train.py", options=("--json", "out.json", "--prove", "0"))
    assert scripts.result()["incidents"] == []
    assert done.code == 0


def test_a_loss_that_a_function_keeps_to_itself_is_found_when_it_is_read(scripts):
    inside = "if loss.item() != loss.item() or loss.item() == float('inf'): return None"
    call = "loss = batch_loss(batch)\n"
    text = SCRIPT.replace("IN_STEP", inside).replace("AT_ONCE", "pass")
    text = text.replace(call, f"{call}        if loss is None: continue\n")
    scripts.write(text)
    done = scripts.warm("train.py", options=("--json", "out.json", "--second-run", "never"))
    (incident,) = scripts.result()["incidents"]
    assert (incident["origin"]["line"], incident["outcome"]["strategy"]) == (LINE, "script")
    assert done.code == 0
