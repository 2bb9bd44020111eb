"""One module in float32: under autocast, with 16-bit weights, and back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from stayfinite.living import Names
from stayfinite.recover.float32 import find_module, has_half_tensors, is_raised, run_in_float32
from stayfinite.snapshot import TrainingState

HALF = [torch.float16, torch.bfloat16]


class Squares(nn.Module):
    """Overflows float16 and needs float32: 300 squared is 90000."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y = x * self.weight if scale is None else x * self.weight * scale
        self.seen.append(y.dtype)
        return (y * y).mean(-1, keepdim=True).sqrt()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4, bias=False)
        self.squares = Squares()
        self.after = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.before.weight.copy_(torch.eye(4))
            self.after.weight.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.squares(self.before(x)))


@pytest.mark.parametrize("dtype", HALF)
def test_under_autocast_the_module_computes_in_float32(dtype: torch.dtype) -> None:
    model = Model()
    x = torch.full((2, 4), 300.0)
    run_in_float32(model.squares)
    with torch.autocast("cpu", dtype=dtype):
        output = model.squares(model.before(x))
        assert torch.is_autocast_enabled("cpu")
        whole = model(x)
    assert output.dtype is torch.float32  # autocast casts it where that is needed
    assert model.squares.seen == [torch.float32] * 2
    assert whole.dtype is dtype
    assert bool(whole.isfinite().all())


@pytest.mark.parametrize("dtype", HALF)
def test_with_half_weights_the_output_is_what_it_was(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    x = torch.full((2, 4), 300.0, dtype=dtype)
    plain = model(x)
    run_in_float32(model.squares)
    raised = model(x)
    assert model.squares.seen == [dtype, torch.float32]
    assert raised.dtype is plain.dtype is dtype
    assert raised[0].item() == pytest.approx(300.0)
    assert bool(plain.isfinite().all()) == (dtype is torch.bfloat16)


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_arrive_at_the_half_weights(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    run_in_float32(model.squares)
    model(torch.full((2, 4), 300.0, dtype=dtype)).sum().backward()
    for param in model.parameters():
        assert param.dtype is dtype
        assert param.grad is not None
        assert param.grad.dtype is dtype
        assert bool(param.grad.isfinite().all())
        assert bool(param.grad.any())


def test_gradients_are_those_of_float32() -> None:
    half, full = Model().bfloat16(), Model()
    run_in_float32(half)
    x = torch.full((2, 4), 3.0)
    half(x.bfloat16()).sum().backward()
    full(x).sum().backward()
    for ours, reference in zip(half.parameters(), full.parameters(), strict=True):
        assert ours.grad is not None
        assert reference.grad is not None
        assert torch.equal(ours.grad, reference.grad.bfloat16())


class Mixed(nn.Module):
    """Returns float32 where it says so itself, besides other things."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        y = self.linear(x)
        return {"same": y, "full": y.float() * 2, "count": torch.tensor(3), "name": "mixed"}


def test_only_what_was_half_before_is_half_again() -> None:
    module = Mixed().half()
    x = torch.ones(1, 2, dtype=torch.float16)
    before = {key: getattr(value, "dtype", value) for key, value in module(x).items()}
    run_in_float32(module)
    for _ in range(2):
        after = {key: getattr(value, "dtype", value) for key, value in module(x).items()}
        assert after == before
    assert module.calls == 3  # nothing was called behind the user's back


def test_hooks_run_once_and_never_see_what_is_only_tried_out() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).half()
    seen: list[type] = []
    handles = [
        each.register_forward_hook(lambda m, args, output: seen.append(type(output)))
        for each in module.modules()
    ]
    run_in_float32(module)
    module(torch.ones(1, 2, dtype=torch.float16))
    assert seen == [Tensor] * 3
    for handle in handles:
        handle.remove()


def test_what_cannot_be_tried_out_is_guessed_by_its_inputs() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if float(x.sum()) > 0 else x * 3

    module = Branching()
    run_in_float32(module)
    assert module(torch.ones(2, dtype=torch.float16)).dtype is torch.float16
    assert module(torch.ones(2)).dtype is torch.float32


def test_random_numbers_are_drawn_as_often_as_before() -> None:
    module = nn.Dropout(0.5)
    run_in_float32(module)
    torch.manual_seed(3)
    module(torch.ones(64, dtype=torch.bfloat16))
    after = torch.rand(3)
    torch.manual_seed(3)
    nn.functional.dropout(torch.ones(64), 0.5)
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("dtype", HALF)
def test_running_statistics_are_written(dtype: torch.dtype) -> None:
    norm = nn.BatchNorm1d(3).to(dtype)
    run_in_float32(norm)
    norm(torch.full((4, 3), 10.0, dtype=dtype))
    assert norm.running_mean is not None
    assert norm.running_mean.dtype is dtype
    assert norm.running_mean.tolist() == pytest.approx([1.0] * 3)
    assert int(norm.num_batches_tracked or 0) == 1


def test_buffers_that_are_assigned_anew_are_kept() -> None:
    class Average(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros((), dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = self.mean * 0.5 + x.mean().detach() * 0.5
            return x - self.mean

    module = Average()
    buffer = module.mean
    run_in_float32(module)
    module(torch.full((3,), 4.0, dtype=torch.float16))
    assert module.mean.dtype is torch.float16
    assert module.mean.item() == 2.0
    assert module.mean is buffer


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_work(kind: type[nn.Module]) -> None:
    module = kind(3, 2).bfloat16()
    x = torch.randn(5, 1, 3, dtype=torch.bfloat16)
    plain = module(x)[0]
    forward = run_in_float32(module)
    raised = module(x)[0]
    assert raised.dtype is torch.bfloat16
    assert torch.allclose(raised.float(), plain.float(), atol=2e-2)
    forward.undo()
    assert torch.equal(module(x)[0], plain)


def test_undo_gives_the_module_its_own_forward_back() -> None:
    model = Model().half()
    own = dict(vars(model.squares))
    forward = run_in_float32(model.squares)
    assert is_raised(model.squares)
    forward.undo()
    forward.undo()
    assert not is_raised(model.squares)
    assert dict(vars(model.squares)) == own
    model(torch.ones(1, 4, dtype=torch.float16))
    assert model.squares.seen == [torch.float16]


def test_undo_gives_a_replaced_forward_back() -> None:
    module = nn.Linear(2, 2)

    def replaced(x: Tensor) -> Tensor:
        return x + 1

    module.forward = replaced  # type: ignore[method-assign]
    forward = run_in_float32(module)
    assert module(torch.ones(1, dtype=torch.float16)).tolist() == [2.0]
    forward.undo()
    assert vars(module)["forward"] is replaced


def test_second_time_on_the_same_module_changes_nothing() -> None:
    model = Model().half()
    first = run_in_float32(model.squares)
    assert run_in_float32(model.squares) is first
    first.undo()
    assert not is_raised(model.squares)
    run_in_float32(model.squares)
    assert model(torch.full((1, 4), 300.0, dtype=torch.float16)).item() == pytest.approx(300.0)


def test_module_within_a_raised_module_can_be_raised_too() -> None:
    model = Model().half()
    run_in_float32(model.squares)
    run_in_float32(model)
    output = model(torch.full((1, 4), 300.0, dtype=torch.float16))
    assert output.dtype is torch.float16
    assert model.squares.seen == [torch.float32]
    model.squares.weight.grad = None
    output.backward()
    assert model.squares.weight.grad is not None


def test_names_and_values_of_the_state_are_unchanged() -> None:
    model = Model().half()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_modules()]
    run_in_float32(model.squares)
    model(torch.ones(1, 4, dtype=torch.float16))
    after = model.state_dict()
    assert [name for name, _ in model.named_modules()] == names
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    model.load_state_dict(before)


def test_modules_keep_the_names_by_which_people_know_them() -> None:
    model = Model().half()
    run_in_float32(model.squares)
    model(torch.ones(1, 4, dtype=torch.float16))
    names = Names()
    assert names.module(model.squares) == ("Model", "squares")
    assert names.tensor(model.squares.weight) == "squares.weight"


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    module, full = Tied().bfloat16(), Tied()
    full.load_state_dict(module.state_dict())
    run_in_float32(module)
    x = torch.ones(1, 3)
    assert torch.equal(module(x.bfloat16()), full(x).bfloat16())
    assert module.second.weight is module.first.weight


def test_copies_use_their_own_weights() -> None:
    model = Model().half()
    run_in_float32(model.squares)
    twin, average = copy.deepcopy(model), AveragedModel(model)
    with torch.no_grad():
        model.squares.weight.fill_(2.0)
    x = torch.ones(1, 4, dtype=torch.float16)
    assert model(x).item() == 2.0
    assert twin(x).item() == 1.0
    assert average(x).item() == 1.0


def test_whole_model_can_be_saved_and_loaded() -> None:
    model = Model().half()
    run_in_float32(model.squares)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded(torch.full((1, 4), 300.0, dtype=torch.float16)).item() == pytest.approx(300.0)


def test_keyword_arguments_are_raised_too() -> None:
    module = Squares().half()
    run_in_float32(module)
    half = torch.full((1, 4), 300.0, dtype=torch.float16)
    assert module(half, scale=half[0]).item() == float("inf")  # 90000 does not fit what it returns
    assert module.seen == [torch.float32]


def test_checkpointed_module_is_computed_again_in_float32() -> None:
    module = Squares().half()
    run_in_float32(module)
    x = torch.full((1, 4), 300.0, dtype=torch.float16, requires_grad=True)
    checkpoint(module, x, use_reentrant=False).sum().backward()
    assert set(module.seen) == {torch.float32}
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_compiled_model_follows_without_a_graph_break() -> None:
    model = Model().half()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.full((1, 4), 300.0, dtype=torch.float16)
    assert compiled(x).item() == float("inf")
    forward = run_in_float32(model.squares)
    assert compiled(x).item() == pytest.approx(300.0)
    assert compiled(x).dtype is torch.float16
    forward.undo()
    assert compiled(x).item() == float("inf")
    torch._dynamo.reset()


def test_restoring_an_older_snapshot_keeps_the_precision() -> None:
    model = Model().half()
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    snapshot, mark = state.capture(), state.mark()
    forward = run_in_float32(model.squares)
    state.restore(snapshot)
    assert is_raised(model.squares)
    state.go_back(mark)
    assert is_raised(model.squares)
    forward.undo()
    state.restore(snapshot)
    assert not is_raised(model.squares)


@pytest.mark.parametrize(
    ("name", "found"),
    [("0", "0"), ("", ""), ("1.0", "1.0"), ("nothing", None), ("1.weight", None), (None, None)],
)
def test_module_is_found_by_its_dotted_name(name: str | None, found: str | None) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    expected = None if found is None else model.get_submodule(found)
    assert find_module(model, name) is expected
    assert find_module(None, name) is None


def test_module_is_found_inside_what_wraps_the_model() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert find_module(torch.compile(model, backend="eager"), "0") is model[0]
    assert find_module(nn.DataParallel(model), "0") is model[0]


def test_half_tensors_are_noticed() -> None:
    assert not has_half_tensors(Model())
    assert has_half_tensors(Model().half())
    model = Model()
    model.after.bfloat16()
    assert has_half_tensors(model)
    assert not has_half_tensors(model.squares)
