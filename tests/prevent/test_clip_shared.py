"""The check before an update believes what clipping has just found out, and nothing else."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import stayfinite
from stayfinite.detect.finite import SMALL, known_norm, note_finite
from stayfinite.prevent.clipping import AdaptiveClipper

NAN = math.nan
NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")
MODES = ("robust", "percentile", "zscore", "per_unit", "per_tensor")


class Job:
    """A model with two large tensors and two small ones, under a guard."""

    def __init__(self, *, guarded: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        self.guard = (
            stayfinite.watch(self.model, self.optimizer, on_nan="warn", sinks=[])
            if guarded
            else None
        )

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 300)).square().mean().backward()

    @property
    def gradients(self) -> list[Tensor]:
        return [param.grad for param in self.model.parameters() if param.grad is not None]

    def close(self) -> None:
        if self.guard is not None:
            self.guard.close()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    job.backward()
    yield job
    job.close()


class Reads(TorchDispatchMode):
    """Names of the operations that are given all elements of a large gradient."""

    def __init__(self, gradients: list[Tensor]) -> None:
        super().__init__()
        self._memory = {g.untyped_storage().data_ptr() for g in gradients if g.numel() > SMALL}
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        large = [t for t in tensors if t.numel() > SMALL]
        if any(t.untyped_storage().data_ptr() in self._memory for t in large):
            self.names.append(str(function))
        return function(*args, **kwargs or {})


def reads_in_step(job: Job, clip: Callable[[Job], Any] | None) -> list[str]:
    job.backward()
    if clip is not None:
        clip(job)
    with Reads(job.gradients) as reads:
        job.optimizer.step()
    return [name for name in reads.names if "view" not in name and "slice" not in name]


CLIPS: dict[str, Callable[[Job], Any]] = {
    "clipped": lambda job: stayfinite.clip_gradients(job.model, 1e-3),
    "not clipped": lambda job: stayfinite.clip_gradients(job.optimizer, 1e9),
    **{mode: lambda job, mode=mode: AdaptiveClipper(job.model, mode).clip() for mode in MODES},
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_clipped_gradients_are_not_read_again(clip: Callable[[Job], Any]) -> None:
    plain, guarded = Job(guarded=False), Job()
    update = reads_in_step(plain, None)
    assert update
    assert len(reads_in_step(guarded, None)) > len(update)
    assert reads_in_step(guarded, clip) == update
    guarded.close()


def test_shared_norm_is_that_of_what_is_left(job: Job) -> None:
    clips = [AdaptiveClipper(job.model, mode).clip for mode in ("per_unit", "per_tensor")]
    for clip in (lambda: stayfinite.clip_gradients(job.model, 0.01), *clips):
        job.backward()
        clip()
        true = float(torch.cat([gradient.flatten().double() for gradient in job.gradients]).norm())
        assert known_norm(job.gradients) == pytest.approx(true, rel=1e-6)


def poison_in_place(gradient: Tensor) -> None:
    gradient.view(-1)[-7] = NAN


def poison_all_data(gradient: Tensor) -> None:
    gradient.data.mul_(NAN)


def poison_by_numpy(gradient: Tensor) -> None:
    array = gradient.numpy()
    array *= np.inf


def unscale_by_nothing(gradient: Tensor) -> None:
    """What a GradScaler does whose scale has fallen to 0."""
    torch._amp_foreach_non_finite_check_and_unscale_(
        [gradient], torch.zeros(()), torch.tensor(math.inf)
    )


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "poison", [poison_in_place, poison_all_data, poison_by_numpy, unscale_by_nothing]
)
def test_gradient_that_changes_after_the_clip_is_judged_anew(
    job: Job, poison: Callable[[Tensor], None], number: int
) -> None:
    stayfinite.clip_gradients(job.model, 1.0)
    poison(job.gradients[number])
    job.optimizer.step()
    assert job.guard is not None
    (incident,) = job.guard.incidents
    assert [report.location for report in incident.reports] == [f"gradients.{NAMES[number]}"]


def test_any_element_of_a_small_gradient_is_judged_anew(job: Job) -> None:
    stayfinite.clip_gradients(job.model, 1.0)
    job.gradients[1].data[123] = NAN
    job.optimizer.step()
    assert job.guard is not None
    assert len(job.guard.incidents) == 1


def test_gradient_that_was_replaced_is_judged_anew(job: Job) -> None:
    stayfinite.clip_gradients(job.model, 1.0)
    param = next(job.model.parameters())
    assert param.grad is not None
    param.grad = param.grad.clone()
    assert known_norm(job.gradients) is None


def test_gradient_that_moved_is_judged_anew(job: Job) -> None:
    stayfinite.clip_gradients(job.model, 1.0)
    gradient = job.gradients[0]
    gradient.data = gradient.clone()
    assert known_norm(job.gradients) is None


def test_second_backward_pass_is_judged_anew(job: Job) -> None:
    stayfinite.clip_gradients(job.model, 1.0)
    job.model(torch.ones(1, 300)).sum().backward()
    assert known_norm(job.gradients) is None


def test_norm_of_other_gradients_is_not_told(job: Job) -> None:
    _, *rest = job.model.parameters()
    stayfinite.clip_gradients(rest, 1.0)
    assert known_norm(job.gradients) is None
    stayfinite.clip_gradients(job.model, 1.0)
    assert known_norm(job.gradients[1:]) is None


def test_norm_is_told_in_any_order_and_once(job: Job) -> None:
    stayfinite.clip_gradients(job.model, 1.0)
    assert known_norm(job.gradients[::-1]) is not None
    assert known_norm(job.gradients) is None


def test_gradients_left_bad_are_not_known(job: Job) -> None:
    poison_in_place(job.gradients[0])
    assert math.isnan(stayfinite.clip_gradients(job.model, 1.0, drop="nothing").norm)
    assert known_norm(job.gradients) is None


def test_gradients_are_not_kept_alive(job: Job) -> None:
    stayfinite.clip_gradients(job.model, 1.0)
    gradients = [weakref.ref(gradient) for gradient in job.gradients]
    job.optimizer.zero_grad(set_to_none=True)
    assert [ref() for ref in gradients] == [None] * 4
    assert known_norm(job.gradients) is None


def test_without_anyone_to_ask_nothing_is_noted() -> None:
    gradients = [torch.ones(SMALL + 1)]
    note_finite(gradients, 1.0)
    assert known_norm(gradients) is None


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(SMALL + 1).to_sparse(),
        torch.ones(2, SMALL).t(),
        torch.ones(1).expand(SMALL + 1),
        torch.ones(SMALL),
    ],
    ids=["sparse", "strided", "expanded", "small"],
)
def test_gradients_of_other_kinds_are_read_again(job: Job, gradient: Tensor) -> None:
    note_finite([gradient], 1.0)
    assert known_norm([gradient]) is None


def test_training_under_a_guard_has_the_bytes_of_training_without() -> None:
    weights = []
    for guarded in (True, False):
        job = Job(guarded=guarded)
        clipper = AdaptiveClipper(job.model)
        for _ in range(5):
            job.backward()
            clipper.clip()
            job.optimizer.step()
        weights.append([param.detach().numpy().tobytes() for param in job.model.parameters()])
        job.close()
    assert weights[0] == weights[1]
