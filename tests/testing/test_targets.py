"""inject(): each kind of target goes bad at its step, a guard notices, and nothing stays behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from injections import STEPS, Job
from scenes import guarded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stayfinite.errors import TrainingAbortedError
from stayfinite.testing import Fault, inject

# What goes bad, where it is said to be, and in which step a guard notices it.
TARGETS: dict[str, tuple[dict[str, Any], str, int]] = {
    "op": ({"op": "softmax"}, "aten._softmax.default", 2),
    "op in full": ({"op": "aten.log.default"}, "aten.log.default", 2),
    "op in backward": ({"op": "_softmax_backward_data"}, "aten._softmax_backward_data.default", 2),
    "node": ({"node": "SoftmaxBackward0"}, "SoftmaxBackward0.0", 2),
    "node without number": ({"node": "LogBackward"}, "LogBackward0.0", 2),
    "module": ({"module": "embed"}, "modules.embed", 2),
    "model": ({"module": ""}, "outputs", 2),
    "gradient": ({"gradient": "head.weight"}, "gradients.head.weight", 2),
    "loss": ({"loss": True}, "loss", 2),
    "inputs": ({"inputs": True}, "inputs.0", 2),
    "inputs by path": ({"inputs": "0"}, "inputs.0", 2),
    "batch": ({"batch": True}, "batch.0", 2),
    "batch by path": ({"batch": "0"}, "batch.0", 2),
    # A bad parameter at the beginning of a step is taken for the work of the update before it.
    "parameter": ({"parameter": "embed.weight"}, "parameters.embed.weight", 1),
    "state": ({"state": "head.weight.exp_avg"}, "optimizer.head.weight.exp_avg", 2),
}
each_target = pytest.mark.parametrize("name", TARGETS)


def hooks_of(job: Job) -> list[Any]:
    """The hooks of all modules, parameters and the optimizer."""
    modules = [(tuple(m._forward_hooks), tuple(m._forward_pre_hooks)) for m in job.model.modules()]
    parameters = [tuple(p._backward_hooks or ()) for p in job.model.parameters()]
    before, after = (
        job.optimizer._optimizer_step_pre_hooks,
        job.optimizer._optimizer_step_post_hooks,
    )
    functions = [torch.autograd.backward, torch.autograd.grad]
    return [modules, parameters, tuple(before), tuple(after), functions]


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    before = hooks_of(made)
    yield made
    assert hooks_of(made) == before


def train(job: Job, fault: Fault) -> None:
    job.train(fault.batches(job.batches) if fault.aim.option == "batch" else None)


@each_target
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_fault_strikes_once_at_its_step(name: str, value: Any, job: Job) -> None:
    options, location, _ = TARGETS[name]
    with inject(job.model, job.optimizer, at_step=2, value=value, **options) as fault:
        train(job, fault)
    (hit,) = fault.hits
    assert fault.fired
    assert (fault.step, hit.step, hit.location) == (STEPS, 2, location)
    assert math.isfinite(hit.before)
    assert str(hit.after) == value


@each_target
def test_guard_stops_at_the_fault(name: str, job: Job) -> None:
    options, _, noticed = TARGETS[name]
    with (
        guarded(on_nan="stop") as guard,
        pytest.raises(TrainingAbortedError),
        inject(job.model, job.optimizer, at_step=2, **options) as fault,
    ):
        train(job, fault)
    assert guard.incidents[0].step == noticed
    assert [hit.step for hit in fault.hits] == [2]


@each_target
def test_guard_inside_the_block_stops_too(name: str, job: Job) -> None:
    options, _, noticed = TARGETS[name]
    with (
        pytest.raises(TrainingAbortedError),
        inject(job.model, job.optimizer, at_step=2, **options) as fault,
        guarded(on_nan="stop") as guard,
    ):
        train(job, fault)
    assert guard.incidents[0].step == noticed
    if name == "loss":
        assert guard.incidents[0].reports[0].location == "loss"


@each_target
def test_steps_before_the_fault_are_byte_identical(name: str, job: Job) -> None:
    options, _, _ = TARGETS[name]
    with inject(job.model, job.optimizer, at_step=STEPS, must_fire=False, **options) as fault:
        train(job, fault)
    assert not fault.fired
    other = Job()
    other.train()
    assert job.losses == other.losses
    assert job.bytes() == other.bytes()


@each_target
def test_nothing_stays_attached_when_the_block_raises(name: str, job: Job) -> None:
    options, _, _ = TARGETS[name]
    hook = job.optimizer.register_step_pre_hook(lambda *_: [None, None][len(job.losses)])
    with pytest.raises(IndexError), inject(job.model, job.optimizer, at_step=1, **options) as fault:
        train(job, fault)
    assert fault.fired
    hook.remove()


@each_target
def test_a_flipped_bit_changes_one_number(name: str, job: Job) -> None:
    options, _, _ = TARGETS[name]
    with inject(job.model, job.optimizer, at_step=2, value="bitflip", **options) as fault:
        train(job, fault)
    (hit,) = fault.hits
    assert hit.before != hit.after


def test_faults_can_be_nested(job: Job) -> None:
    with (
        inject(job.model, job.optimizer, gradient="head.bias", at_step=1, element=0) as first,
        inject(job.model, job.optimizer, gradient="head.bias", at_step=1, element=2) as second,
        inject(job.model, job.optimizer, op="log", at_step=3) as third,
        inject(job.model, job.optimizer, module="embed", at_step=4) as fourth,
    ):
        job.train()
    faults = [first, second, third, fourth]
    assert [fault.hits[0].step for fault in faults] == [1, 1, 3, 4]
    assert [first.hits[0].element, second.hits[0].element] == [0, 2]
    assert job.model.head.bias.isnan().tolist() == [True] * 3  # by the third


def test_only_the_chosen_element_is_bad(job: Job) -> None:
    seen: list[Tensor] = []
    job.model.embed.register_forward_hook(lambda _, args, output: seen.append(output.detach()))
    with inject(job.model, job.optimizer, module="embed", at_step=2, element=5):
        job.train()
    assert seen[2].isnan().flatten().nonzero().tolist() == [[5]]
    job.model.embed._forward_hooks.clear()


def test_gradients_flow_through_a_spoiled_output() -> None:
    layer = nn.Linear(2, 3)
    with inject(layer, module="", element=4):
        layer(torch.ones(2, 2)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2.0, 2.0]] * 3


def test_spoiled_batch_is_a_copy(job: Job) -> None:
    with inject(job.model, job.optimizer, batch=True, at_step=2) as fault:
        job.train(fault.batches(job.batches))
    assert all(inputs.isfinite().all() for inputs, _ in job.batches)


def test_batches_stand_in_for_a_loader(job: Job) -> None:
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(6, 6), torch.zeros(6, dtype=torch.long)),
        batch_size=2,
    )
    with inject(optimizer=job.optimizer, batch="0", at_step=1, element=0) as fault:
        batches = fault.batches(loader)
        assert (len(batches), batches.batch_size) == (3, 2)  # type: ignore[arg-type,attr-defined]
        job.train(batches)
    assert [math.isnan(loss) for loss in job.losses] == [False, True, True]


Batches: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: [torch.zeros(2, dtype=torch.long), x],
    "dict": lambda x: {"ids": torch.zeros(2, dtype=torch.long), "inputs": {"x": x}},
    "tensor": lambda x: x,
}


@pytest.mark.parametrize("kind", Batches)
def test_a_number_that_can_be_nan_is_found_in_any_batch(kind: str) -> None:
    batch = Batches[kind](torch.ones(3))
    with inject(batch=True, element=1) as fault:
        (delivered,) = fault.batches([batch])
    assert type(delivered) is type(batch)
    assert fault.hits[0].before == 1.0
    assert str(delivered).count("nan") == 1
    assert str(batch).count("nan") == 0


def test_keyword_inputs_of_a_model_are_found() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            return x * mask

    model = Two()
    with inject(model, inputs="mask", element=0) as fault:
        out = model(torch.ones(2), mask=torch.ones(2))
    assert out.isnan().tolist() == [True, False]
    assert fault.hits[0].location == "inputs.mask"


def test_loss_and_its_scaled_form_go_bad_together(job: Job) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with inject(job.model, job.optimizer, loss=True, at_step=0) as fault:
        loss = job.model(job.batches[0][0]).square().mean()
        scaled = scaler.scale(loss)
        scaled.backward()
    assert loss.isnan()
    assert scaled.isnan()
    assert job.model.head.weight.grad is not None
    assert job.model.head.weight.grad.isnan().any()
    assert fault.hits[0].location == "loss"


def test_loss_of_autograd_grad_goes_bad() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with inject(loss=True):
        (gradient,) = torch.autograd.grad(outputs=leaf.square().sum(), inputs=[leaf])
    assert gradient.isnan().all()


def test_sparse_gradient_goes_bad() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    with inject(table, gradient="weight", element=1):
        table(torch.tensor([3, 1])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense().isnan().nonzero().tolist() == [[1, 1]]


def test_in_place_operator_goes_bad() -> None:
    held = torch.zeros(3)
    with inject(op="add_", element=2):
        held.add_(1.0)
    assert held.isnan().tolist() == [False, False, True]


def test_operator_with_several_results_goes_bad() -> None:
    with inject(op="layer_norm", element=0) as fault:
        out = nn.functional.layer_norm(torch.randn(2, 3), (3,))
    assert out.isnan().sum() == 1
    assert fault.hits[0].location == "aten.native_layer_norm.default"


def test_operator_in_the_update_goes_bad(job: Job) -> None:
    with inject(job.model, job.optimizer, op="aten._foreach_sqrt", at_step=1, must_fire=False):
        pass
    with inject(optimizer=job.optimizer, op="addcdiv_", at_step=1) as fault:
        job.optimizer.param_groups[0]["foreach"] = False
        job.train()
    assert fault.hits[0].step == 1


def test_a_mode_that_outlives_the_block_stays_on() -> None:
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen += 1
            return func(*args, **(kwargs or {}))

    above = Count()
    with inject(op="exp", element=0) as fault:
        above.__enter__()
        torch.ones(1).exp()
    seen = above.seen
    torch.ones(1).exp()
    above.__exit__(None, None, None)
    assert above.seen == seen + 2
    assert len(fault.hits) == 1
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_bytes_are_as_without_the_block_afterwards(job: Job) -> None:
    """What a fault did to the loss alone leaves no trace in the random numbers."""
    with inject(job.model, job.optimizer, loss=True, value="bitflip", at_step=1):
        job.train()
    other = Job()
    other.train()
    assert job.bytes() == other.bytes()
