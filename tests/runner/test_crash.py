"""A script that a NaN has killed keeps its own words and exit code, and is explained."""

from __future__ import annotations

import pytest

SCRIPT = """
import torch
from torch.distributions import Normal

scale = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([scale], lr=0.5)
for step in range(9):
    policy = Normal(torch.zeros(2), torch.log(scale) + 1.0)
    loss = policy.scale.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_crash_by_a_nan_is_explained(scripts):
    scripts.write(SCRIPT)
    plain = scripts.alone("train.py")
    done = scripts.warm("train.py", options=("--json", "out.json"))
    result = scripts.result()
    assert plain.code == done.code == 1
    assert done.err.startswith(plain.err)
    assert result["exit"] == "incident"
    (incident,) = result["incidents"]
    assert incident["origin"]["line"] == 8
    assert incident["diagnosis"]["cause"] in ("log_of_negative", "log_of_zero")


IN_A_CHILD = """
import math, multiprocessing, sys, torch


def train():
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(9):
        loss = torch.log(net(torch.ones(3, 2)).square() * (step != 5)).mean()
        if not math.isfinite(loss.item()):
            LEAVE
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    child = multiprocessing.get_context("METHOD").Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("leave", ["raise ValueError(f'loss {loss}')", "sys.exit(1)"])
def test_crash_of_a_child_process_is_explained(scripts, method, leave):
    scripts.write(IN_A_CHILD.replace("METHOD", method).replace("LEAVE", leave))
    never = ("--second-run", "never", "--prove", "0", "--no-record", "--json", "out.json")
    done = scripts.warm("train.py", options=never)
    assert done.code == 1
    (incident,) = scripts.result()["incidents"]
    assert (incident["step"], incident["origin"]["line"]) == (5, 10)
    assert incident["origin"]["exact"]
    assert incident["diagnosis"]["cause"] == "log_of_zero"


LOADED = """
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        row = torch.full((3,), float(index != 9))
        return row / row.norm()


def collate(rows):
    batch = torch.stack(rows)
    if not torch.isfinite(batch).all():
        raise ValueError("a batch has a NaN")
    return batch


def main():
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in DataLoader(Rows(), batch_size=2, collate_fn=collate, num_workers=WORKERS):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_a_collate_function_is_explained_by_the_sample(scripts, workers):
    scripts.write(LOADED.replace("WORKERS", str(workers)))
    done = scripts.warm("train.py", options=("--json", "out.json", "--second-run", "never"))
    assert done.code == 1
    (incident,) = scripts.result()["incidents"]
    assert (incident["step"], incident["origin"]["line"]) == (4, 12)
    said = "Sample 9 of Rows was read again"
    assert any(said in each for each in incident["diagnosis"]["evidence"])


SOLVER = """
def integrate(field, state):
    for _ in range(8):
        state = state + 0.1 * field(state)
    for _ in range(8):
        assert not (state != state).any(), "underflow in dt 0.0"
        state = state * 0.5
    return state
"""

SOLVED = """
import sys
sys.path.insert(0, "site-packages")
import torch
from solver import integrate

torch.manual_seed(0)
net = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def field(state):
    return net(state) / state.norm(dim=-1, keepdim=True)


for step in range(8):
    start = torch.randn(4, 3)
    if step == 5:
        start[2] = 0.0
    end = integrate(field, start)
    optimizer.zero_grad()
    end.square().mean().backward()
    optimizer.step()
"""


def test_assert_of_a_solver_several_frames_deep_is_explained(scripts):
    scripts.write(SOLVER, "site-packages/solver.py")
    scripts.write(SOLVED)
    options = ("--json", "out.json", "--second-run", "never")
    done = scripts.warm("train.py", options=options)
    assert done.code == 1
    (incident,) = scripts.result()["incidents"]
    assert (incident["step"], incident["origin"]["file"]) == (5, "train.py")
    assert "state.norm(" in incident["origin"]["code"]


TRAINER = """
import torch


class Trainer:
    def fit(self, net, loader):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.batches = iter(loader)
        try:
            for _ in range(len(loader)):
                loss = self.training_step(net, *next(self.batches))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        finally:
            self.batches = None

    def training_step(self, net, x):
        loss = net(x).square().mean()
        if torch.isnan(loss):
            raise Exception("Loss is NaN, training stopped.")
        return loss
"""

FITTED = """
import sys
sys.path.insert(0, "site-packages")
import torch
from fitlib import Trainer
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(16, 3)
x[9, 1] = float("nan")
Trainer().fit(torch.nn.Linear(3, 1), DataLoader(TensorDataset(x), batch_size=4))
"""


def test_a_bad_batch_inside_a_framework_is_data_that_came_by_the_users_call(scripts):
    """The framework's loop cannot be run again, as it has cleaned up; its functions can."""
    scripts.write(TRAINER, "site-packages/fitlib.py")
    scripts.write(FITTED)
    options = ("--json", "out.json", "--second-run", "never")
    done = scripts.warm("train.py", options=options)
    assert done.code == 1
    (incident,) = scripts.result()["incidents"]
    origin, diagnosis = incident["origin"], incident["diagnosis"]
    assert (origin["file"], origin["line"], origin["phase"]) == ("train.py", 11, "data")
    assert origin["exact"]
    assert diagnosis["cause"] == "bad_input_data"
    assert any("sample 9 of the dataset" in said for said in diagnosis["evidence"])
