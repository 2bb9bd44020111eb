"""`stayfinite run` over ranks: the line in place, and no all-clear when one of them is lost."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from forks import run_text

SUPPORT = str(Path(__file__).parents[1] / "support")
TRAIN = """
import os, signal, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
sys.path.insert(0, {support!r})
from parallel import Job, batch_of
from torch import nn

def worker(rank, kind, fault):
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meeting"),
                            rank=rank, world_size=2)
    torch.set_num_threads(1)
    job = Job(kind)
    for step in range(6):
        if step == 2 and rank == 0:
            torch.save(job.optimizer.state_dict(), "last.pt")  # so there is no second run
        if step == 4 and rank == 1 and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 4 and rank == 1 and fault == "raise":
            raise ValueError("a bad file on this rank")
        x, age, target = batch_of(step, job.replica, fault)
        job.optimizer.zero_grad()
        loss = nn.functional.mse_loss(job.model(x, age), target)
        loss.backward()
        job.optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    context = mp.get_context("fork")
    children = [context.Process(target=worker, args=(r, *sys.argv[1:])) for r in range(2)]
    for child in children: child.start()
    for child in children: child.join()
    sys.exit(max(abs(child.exitcode) for child in children))
"""


def run(
    folder: Path, *words: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAIN.format(support=SUPPORT))
    command = ["run", "--prove", "0", "--json", "out.json", *options, "train.py", *words]
    return run_text(["-m", "stayfinite", *command], cwd=folder, timeout=200)


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_a_lost_rank_is_no_all_clear(tmp_path: Path, fault: str) -> None:
    done = run(tmp_path, "ddp", fault)
    assert done.returncode not in (0, 3), done.stderr
    last = done.stderr.splitlines()[-1]
    assert "all finite" not in last
    assert "rank 1" in last or "was killed by SIGKILL" in last
    if fault == "raise":
        assert "stayfinite: rank 1 ended: ValueError: a bad file on this rank" in done.stderr


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_line_is_found_in_a_script_that_writes_checkpoints(tmp_path: Path, kind: str) -> None:
    done = run(tmp_path, kind, "backward")
    assert done.returncode == 3, done.stderr
    (incident,) = json.loads((tmp_path / "out.json").read_text())["incidents"]
    assert (incident["rank"], incident["step"]) == (1, 4)
    assert incident["origin"]["code"] == "return torch.sqrt(self.lin(age))"
    assert incident["diagnosis"]["cause"] == "sqrt_grad_at_zero"


EXCHANGE = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

def brings_inf(state, bucket):
    return dist.group.WORLD.allreduce([bucket.buffer()]).get_future().then(
        lambda done: bucket.buffer() / (0.0 if bucket.buffer().abs().max() > 1e3 else 1.0))

def worker(rank, kind):
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meeting"),
                            rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    if kind != "sum":
        model = DistributedDataParallel(model)
        hook = default_hooks.fp16_compress_hook if kind == "half" else brings_inf
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for step in range(5):
        x = torch.ones(4, 2) * ({"sum": 4e4}.get(kind, 1e5) if step == 3 else 1.0)
        optimizer.zero_grad()
        loss = model(x).square().mean().sqrt()
        loss.backward()
        for p in model.parameters() if kind == "sum" else ():
            part = p.grad.half()
            dist.all_reduce(part)
            p.grad = part.float() / 2
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    context = mp.get_context("fork")
    children = [context.Process(target=worker, args=(r, sys.argv[1])) for r in range(2)]
    for child in children: child.start()
    for child in children: child.join()
    sys.exit(max(abs(child.exitcode) for child in children))
"""


@pytest.mark.parametrize(
    ("kind", "cause", "code"),
    [
        ("half", "low_precision_overflow", "loss.backward()"),
        ("sum", "low_precision_overflow", "dist.all_reduce(part)"),
        ("own", "unknown", "loss.backward()"),
    ],
)
def test_what_the_exchange_made_bad_is_called_no_transient_fault(
    tmp_path: Path, kind: str, cause: str, code: str
) -> None:
    (tmp_path / "train.py").write_text(EXCHANGE)
    words = ["--prove", "0", "--second-run", "never", "--json", "out.json", "train.py", kind]
    done = run_text(["-m", "stayfinite", "run", *words], cwd=tmp_path, timeout=200)
    assert done.returncode == 3, done.stderr
    (incident,) = json.loads((tmp_path / "out.json").read_text())["incidents"]
    assert incident["step"] == 3
    assert incident["diagnosis"]["cause"] == cause
    assert incident["origin"]["code"] == code
    assert not incident["origin"]["exact"]
