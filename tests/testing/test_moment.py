"""When a fault strikes: its step, its rank, and again only if it is persistent."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from injections import STEPS, Job
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from stayfinite import testing
from stayfinite.detect.hooks import StepListener, run_again, watch_steps
from stayfinite.errors import ConfigError
from stayfinite.testing import inject


class Veto(StepListener):
    """Vetoes bad updates, as a guard does."""

    def stepped(self, optimizer: Optimizer, *, vetoed: bool | None) -> None:
        self.vetoed = vetoed

    def skipped_by_scaler(self, optimizer: Optimizer, *, scaler: Any) -> None:
        raise AssertionError


def run_with_retries(job: Job, *, most: int) -> list[int]:
    """Train with a veto, going back before each bad step and running it again; tries per step."""
    tries = []
    with watch_steps(veto := Veto(), optimizer=job.optimizer):
        for batch in job.batches:
            tries.append(0)
            before = (torch.get_rng_state(), [b.clone() for b in job.model.buffers()])
            while tries[-1] < most:
                tries[-1] += 1
                job.step(batch)
                if not veto.vetoed:
                    break
                torch.set_rng_state(before[0])
                for buffer, kept in zip(job.model.buffers(), before[1], strict=True):
                    buffer.copy_(kept)
    return tries


TARGETS: list[dict[str, Any]] = [
    {"gradient": "head.weight"},
    {"op": "softmax"},
    {"node": "LogBackward0"},
    {"module": "norm"},
    {"inputs": True},
    {"loss": True},
]
each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: next(iter(target)))


@each_target
def test_transient_fault_is_gone_in_the_retry(target: dict[str, Any]) -> None:
    clean = Job()
    clean.train()
    expected = clean.bytes()
    job = Job()
    with inject(job.model, job.optimizer, at_step=2, **target) as fault:
        assert run_with_retries(job, most=3) == [1, 1, 2, 1, 1]
    assert [hit.step for hit in fault.hits] == [2]
    assert fault.step == STEPS + 1  # the vetoed one was attempted
    assert job.bytes() == expected


@each_target
def test_persistent_fault_is_there_whenever_the_step_runs(target: dict[str, Any]) -> None:
    job = Job()
    with inject(job.model, job.optimizer, at_step=2, persistent=True, **target) as fault:
        assert run_with_retries(job, most=3) == [1, 1, 3, 1, 1]
    assert [hit.step for hit in fault.hits] == [2, 3, 4]


def test_persistent_fault_is_not_there_in_the_next_step_with_the_same_batch() -> None:
    job = Job()
    job.batches = job.batches[:1] * STEPS
    with inject(
        job.model, job.optimizer, module="head", at_step=1, value="bitflip", bit=0, persistent=True
    ) as fault:
        job.train()
    assert [hit.step for hit in fault.hits] == [1]


def test_persistent_batch_is_bad_in_every_epoch() -> None:
    job = Job(SGD)
    delivered: list[bool] = []
    with inject(batch=True, persistent=True, element=0) as fault:
        for _ in range(2):
            batches = fault.batches(job.batches)
            delivered += [bool(inputs.isnan().any()) for inputs, _ in batches]
    assert delivered == [True, False, False, False, False] * 2
    assert len(fault.hits) == 2


def test_transient_batch_is_bad_once() -> None:
    job = Job()
    with inject(batch=True) as fault:
        delivered = [bool(x.isnan().any()) for _ in range(2) for x, _ in fault.batches(job.batches)]
    assert sum(delivered) == 1


def test_a_step_that_is_run_again_is_counted_once() -> None:
    job = Job()
    with inject(job.model, job.optimizer, loss=True, at_step=1) as fault:
        job.step(job.batches[0])
        with run_again():
            job.step(job.batches[0])
        assert (fault.step, fault.fired) == (1, False)
        job.step(job.batches[1])
    assert (fault.step, fault.fired) == (2, True)


def test_steps_that_a_scaler_skips_are_counted() -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with (
        inject(model, optimizer, gradient="weight", at_step=1, value="inf") as first,
        inject(model, optimizer, gradient="bias", at_step=3, value="inf") as second,
    ):
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(3, 2)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert first.step == second.step == 5
    assert [first.hits[0].step, second.hits[0].step] == [1, 3]
    assert scaler.get_scale() == 2.0  # both were noticed by the scaler
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_first_of_accumulated_backward_passes_is_struck() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    gradients: list[Tensor] = []
    with inject(model, optimizer, gradient="weight", at_step=1, value="inf", element=0) as fault:
        for micro in range(8):
            model(torch.ones(3, 2)).square().mean().backward()
            assert model.weight.grad is not None
            gradients.append(model.weight.grad.clone())
            if micro % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    assert [bool(g.isinf().any()) for g in gradients] == [False] * 4 + [True] * 4
    assert len(fault.hits) == 1


def test_only_the_given_optimizer_counts() -> None:
    one, two = Job(), Job()
    with inject(two.model, two.optimizer, gradient="head.bias", at_step=1) as fault:
        one.train()
        assert fault.step == 0
        two.train()
    assert fault.hits[0].step == 1


def test_without_an_optimizer_the_busiest_one_counts() -> None:
    one, two = Job(), Job()
    with inject(two.model, gradient="head.bias", at_step=STEPS) as fault:
        two.step(two.batches[0])
        one.train()
        two.step(two.batches[0])
    assert fault.hits[0].step == STEPS


def test_fault_strikes_on_its_rank_only() -> None:
    job = Job()
    with inject(job.model, job.optimizer, loss=True, at_step=1, rank=1) as fault:
        job.train()
    assert not fault.fired  # alone we are rank 0, and that is no error
    with inject(job.model, job.optimizer, loss=True, at_step=1, rank=0) as fault:
        job.train()
    assert fault.fired


def test_a_step_that_is_never_reached_is_an_error() -> None:
    job = Job()
    message = r"at_step is 9 .*only 5 updates were attempted, so loss=True never went bad"
    with (
        pytest.raises(ConfigError, match=message),
        inject(job.model, job.optimizer, loss=True, at_step=9),
    ):
        job.train()


def test_a_module_that_never_ran_is_an_error() -> None:
    job = Job()
    job.model.spare = nn.Linear(1, 1)
    with (
        pytest.raises(ConfigError, match=r"module is 'spare'; nothing of that name ran in step 1"),
        inject(job.model, job.optimizer, module="spare", at_step=1),
    ):
        job.train()


def test_the_example_in_the_docstring_runs() -> None:
    tried = doctest.testmod(testing)
    assert (tried.failed, tried.attempted > 0) == (0, True)


def test_the_error_of_the_block_comes_first() -> None:
    job = Job()
    with pytest.raises(KeyError), inject(job.model, job.optimizer, loss=True, at_step=9):
        raise KeyError
