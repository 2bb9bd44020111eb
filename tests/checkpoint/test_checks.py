"""Everything that is wrong is found before the model is touched, and all of it is told."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Job, Net, fingerprint, values_only
from safetensors.torch import save_file
from torch import nn

from stayfinite.checkpoint import Problem, load_checkpoint, save_checkpoint, validate_checkpoint
from stayfinite.errors import CheckpointError


def model_of(**tensors: Any) -> nn.Module:
    """A module with these buffers, and parameters where the name begins with "p_"."""
    model = nn.Module()
    for name, value in tensors.items():
        tensor = torch.as_tensor(value)
        if name.startswith("p_"):
            model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        else:
            model.register_buffer(name, tensor)
    return model


def found(path: Path, **members: Any) -> dict[str, Problem]:
    """What a refused load says, by key; everyone stays as they were."""
    before = {name: fingerprint(member) for name, member in members.items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, **members)
    assert {name: fingerprint(member) for name, member in members.items()} == before
    return {problem.key: problem for problem in caught.value.problems}


def saved(tmp_path: Path, model: nn.Module, **options: Any) -> Path:
    path = save_checkpoint(tmp_path / "a.ckpt", model=model, **options)
    assert path is not None
    return path


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    path = saved(tmp_path, model_of(p_a=[1.0, 2.0], b=[1.0], only_in_file=[0.0], d=[1.0]))
    model = model_of(p_a=[1.0, 2.0, 3.0], b=[1], only_in_model=[0.0], d=[1.0])
    problems = found(path, model=model)
    assert {key: problem.kind for key, problem in problems.items()} == {
        "model.p_a": "shape",
        "model.b": "dtype",
        "model.only_in_file": "unexpected",
        "model.only_in_model": "missing",
    }
    assert "[2], and in the model [3]" in problems["model.p_a"].message
    assert problems == {problem.key: problem for problem in validate_checkpoint(path, model)}


def test_plain_attribute_that_the_file_lacks_is_an_error(tmp_path: Path) -> None:
    class Lost(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.scale_factor = torch.tensor(1.0)

    torch.save(Lost().state_dict(), tmp_path / "a.pt")
    problems = found(tmp_path / "a.pt", model=Lost())
    assert list(problems) == ["model.scale_factor"]
    assert "plain attribute" in problems["model.scale_factor"].message


def test_attribute_that_the_model_lacks_is_an_error_that_says_how_to_go_on(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.last_attention = torch.ones(3)
    path = saved(tmp_path, model)
    (problem,) = found(path, model=nn.Linear(2, 2)).values()
    assert (problem.kind, problem.key) == ("unexpected", "model.last_attention")
    assert problem.message.endswith('if nothing needs it, pass ignore=["last_attention"].')
    load_checkpoint(path, model=nn.Linear(2, 2), ignore=["last_attention"])


def test_attribute_that_came_after_the_save_is_an_error_that_says_how_to_go_on(
    tmp_path: Path,
) -> None:
    model = nn.Linear(2, 2)
    path = saved(tmp_path, model)
    model.last_attention = torch.ones(3)
    (problem,) = found(path, model=model).values()
    assert (problem.kind, problem.key) == ("missing", "model.last_attention")
    assert problem.message.endswith('If nothing needs it, pass ignore=["last_attention"].')
    load_checkpoint(path, model=model, ignore=["last_attention"])


def test_entry_that_is_no_tensor_is_an_error(tmp_path: Path) -> None:
    torch.save({"model": {**nn.Linear(2, 2).state_dict(), "scale": 0.18}}, tmp_path / "a.pt")
    (problem,) = found(tmp_path / "a.pt", model=nn.Linear(2, 2)).values()
    assert (problem.kind, problem.key) == ("unexpected", "model.scale")
    load_checkpoint(tmp_path / "a.pt", model=nn.Linear(2, 2), ignore=["scale"])


def test_ignored_tensors_may_hold_anything(tmp_path: Path) -> None:
    torch.save({**nn.Linear(1, 1).state_dict(), "old": torch.tensor(math.nan)}, tmp_path / "a.pt")
    load_checkpoint(tmp_path / "a.pt", model=nn.Linear(1, 1), ignore=["old"])


def test_unexpected_and_missing_are_warnings_when_not_strict(tmp_path: Path) -> None:
    path = saved(tmp_path, model_of(p_a=[1.0], p_b=[2.0]))
    model = model_of(p_a=[0.0], p_c=[5.0])
    loaded = load_checkpoint(path, model=model, strict=False)
    assert {p.key: p.kind for p in loaded.warnings} == {
        "model.p_b": "unexpected",
        "model.p_c": "missing",
    }
    assert model.p_a.tolist() == [1.0]
    assert model.p_c.tolist() == [5.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, 1e-40])
def test_uninitialised_leftovers_are_an_error_even_when_not_strict(
    tmp_path: Path, value: float
) -> None:
    path = saved(tmp_path, model_of(p_a=[1.0]))
    model = model_of(p_a=[0.0], p_left=[value, 0.0])
    with pytest.raises(CheckpointError, match=r"model\.p_left: .* looks uninitialised"):
        load_checkpoint(path, model=model, strict=False)
    assert model.p_a.tolist() == [0.0]


BAD_VALUES: dict[str, Any] = {
    "model.p_weight": ({"p_weight": [1.0, math.nan]}, "nonfinite"),
    "model.p_big": ({"p_big": [1.0, -math.inf]}, "nonfinite"),
    "model.scale": ({"scale": math.inf}, "nonfinite"),
    "model.statistics": ({"statistics": [1.0, 2.0, math.inf]}, "nonfinite"),
    "model.running_mean": ({"running_mean": [0.0, -math.inf]}, "nonfinite"),
    "model.running_var": ({"running_var": [1.0, -1e-3]}, "variance"),
}


@pytest.mark.parametrize("key", BAD_VALUES)
def test_bad_values_are_refused(tmp_path: Path, key: str) -> None:
    tensors, kind = BAD_VALUES[key]
    model = model_of(**tensors)
    path = saved(tmp_path, model, if_bad="aside")
    assert path.name.endswith(".nonfinite")
    good = {name: torch.ones(torch.as_tensor(value).shape) for name, value in tensors.items()}
    problems = found(path, model=model_of(**good))
    assert {k: p.kind for k, p in problems.items()} == {key: kind}
    torch.save(model.state_dict(), tmp_path / "a.pt")
    assert {p.key: p.kind for p in validate_checkpoint(tmp_path / "a.pt")} == {key: kind}


def test_zero_variance(tmp_path: Path) -> None:
    path = saved(tmp_path, model_of(running_var=[1.0, 0.0]))
    (problem,) = validate_checkpoint(path)
    assert (problem.kind, problem.is_error) == ("variance", False)
    path = saved(tmp_path, model_of(running_var=[0.0, 0.0]), if_bad="aside")
    (problem,) = validate_checkpoint(path)
    assert (problem.kind, problem.is_error) == ("variance", True)


# Precision


def test_value_that_overflows_in_the_model_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, model_of(mean=[90000.0]))
    problems = found(path, model=model_of(mean=torch.ones(1, dtype=torch.float16)))
    assert problems["model.mean"].message == "holds 9e+04, which is Inf in the model's float16."


def test_value_that_was_cut_off_when_saved_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, model_of(mean=torch.tensor([65504.0]).half()))
    problems = found(path, model=model_of(mean=[1.0]))
    assert "the limit of the file's float16" in problems["model.mean"].message


@pytest.mark.parametrize(
    ("stored", "present", "lost"),
    [
        (torch.bfloat16, torch.float32, "was lost when it was saved"),
        (torch.float64, torch.float32, "is lost by loading"),
    ],
)
def test_lost_precision_is_one_warning(
    tmp_path: Path, stored: torch.dtype, present: torch.dtype, lost: str
) -> None:
    path = saved(tmp_path, nn.Linear(3, 3, dtype=stored))
    loaded = load_checkpoint(path, model=nn.Linear(3, 3, dtype=present))
    (warning,) = loaded.warnings
    assert warning.kind == "narrowed"
    assert lost in warning.message
    assert "and 1 more" in warning.message


# Optimizers


def trained(optimizer_class: Any = torch.optim.Adam, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def half_moments(model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].half()


def negative_moment(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model[0].weight]["exp_avg_sq"][0, 0] = -1e-9


def nan_moment(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model[0].bias]["exp_avg"][0] = math.nan


def misshaped_moment(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model[1].bias]["exp_avg"] = torch.zeros(7)


def lr_of(value: Any) -> Callable[[nn.Module, Any], None]:
    def change(model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = value

    return change


def nan_beta(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["betas"] = (0.9, math.nan)


OPTIMIZER_BUGS: dict[str, Any] = {
    "half": (half_moments, "optimizer.state.0.weight.exp_avg", "narrowed"),
    "negative": (negative_moment, "optimizer.state.0.weight.exp_avg_sq", "optimizer"),
    "nan": (nan_moment, "optimizer.state.0.bias.exp_avg", "nonfinite"),
    "shape": (misshaped_moment, "optimizer.state.1.bias.exp_avg", "shape"),
    "lr nan": (lr_of(math.nan), "optimizer.param_groups.0.lr", "learning_rate"),
    "lr inf": (lr_of(math.inf), "optimizer.param_groups.0.lr", "learning_rate"),
    "lr negative": (lr_of(-0.1), "optimizer.param_groups.0.lr", "learning_rate"),
    "lr tensor": (lr_of(torch.tensor(math.nan)), "optimizer.param_groups.0.lr", "learning_rate"),
    "betas": (nan_beta, "optimizer.param_groups.0.betas", "optimizer"),
}


@pytest.mark.parametrize("layout", ["ours", "torch"])
@pytest.mark.parametrize("name", OPTIMIZER_BUGS)
def test_bad_optimizer_state_is_refused(tmp_path: Path, name: str, layout: str) -> None:
    change, key, kind = OPTIMIZER_BUGS[name]
    model, optimizer = trained()
    change(model, optimizer)
    if layout == "ours":
        path = saved(tmp_path, model, optimizer=optimizer, if_bad="aside")
    else:
        path = tmp_path / "a.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        if name in ("negative", "nan"):  # the file has numbers instead of names
            key = key.replace("0.weight", "0").replace("0.bias", "1")
    other, other_optimizer = trained()
    problems = found(path, model=other, optimizer=other_optimizer)
    assert problems[key].kind == kind, problems


def test_state_of_another_order_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = saved(tmp_path, model, optimizer=optimizer)
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    reordered = torch.optim.Adam([*other[1].parameters(), *other[0].parameters()])
    problems = found(path, model=other, optimizer=reordered)
    assert "was that of 0.weight, and would go to 1.weight" in problems["optimizer.state.0"].message


def test_optimizer_of_another_kind_or_size_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = saved(tmp_path, model, optimizer=optimizer)
    problems = found(path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    assert "was saved from Adam and would go to SGD" in problems["optimizer"].message
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    problems = found(path, model=model, optimizer=torch.optim.Adam(groups))
    assert "[4] parameters, and the optimizer has [2, 2]" in (
        problems["optimizer.param_groups"].message
    )


@pytest.mark.parametrize("second", [0.1, 0.2])
def test_groups_by_name_are_joined_only_where_their_settings_are_the_same(
    second: float, tmp_path: Path
) -> None:
    model, optimizer = trained()
    names, state = [name for name, _ in model.named_parameters()], optimizer.state_dict()
    (whole,) = state["param_groups"]
    halves = [(names[:2], 0.1), (names[2:], second)]
    groups = [{**whole, "params": own, "lr": rate} for own, rate in halves]
    by_name = {names[number]: own for number, own in state["state"].items()}
    path = tmp_path / "by_name.pt"
    saved_optimizer = {"state": by_name, "param_groups": groups}
    torch.save({"model": model.state_dict(), "optimizer": saved_optimizer}, path)
    joined = torch.optim.Adam(model.parameters(), lr=1.0)
    if second == 0.1:
        load_checkpoint(path, model=model, optimizer=joined)
        assert [group["lr"] for group in joined.param_groups] == [0.1]
        assert len(joined.state) == 4
    else:
        problems = found(path, model=model, optimizer=joined)
        assert "groups of [2, 2] parameters" in problems["optimizer.param_groups"].message


def test_what_is_asked_for_and_not_there_is_an_error(tmp_path: Path) -> None:
    job = Job()
    path = saved(tmp_path, job.model)
    with pytest.raises(CheckpointError) as caught:
        job.load(path)
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["optimizer", "scheduler", "scaler", "ema"]


def test_what_is_there_and_not_asked_for_is_a_warning_of_those_who_go_on(tmp_path: Path) -> None:
    job = Job()
    job.train(1)
    path = job.save(tmp_path / "a.ckpt")
    loaded = load_checkpoint(path, model=job.model, optimizer=job.optimizer)
    assert [(p.key, p.kind) for p in loaded.warnings] == [
        ("scheduler", "not_loaded"),
        ("scaler", "not_loaded"),
        ("ema", "not_loaded"),
    ]
    assert load_checkpoint(path, model=job.model).warnings == ()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_dead_loss_scale_is_refused(tmp_path: Path, scale: float) -> None:
    job = Job()
    job.train(1)
    job.scaler.load_state_dict({**job.scaler.state_dict(), "scale": scale})
    with pytest.raises(CheckpointError, match=r"scaler\.scale: the loss scale is"):
        job.save(tmp_path / "a.ckpt")


def test_rates_of_a_scheduler_are_checked(tmp_path: Path) -> None:
    job = Job()
    job.scheduler.base_lrs = [math.nan]
    with pytest.raises(CheckpointError, match=r"scheduler\.base_lrs: the learning rate is nan"):
        job.save(tmp_path / "a.ckpt")


@pytest.mark.parametrize("layout", ["ours", "torch"])
def test_absurd_rate_is_a_warning(tmp_path: Path, layout: str) -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 1e27
    path = tmp_path / "a.pt"
    if layout == "ours":
        save_checkpoint(path, model=model, optimizer=optimizer)
    else:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    (problem,) = validate_checkpoint(path, model)
    assert (problem.kind, problem.is_error) == ("learning_rate", False)
    assert "optimizer.param_groups.0.lr: the learning rate is 1e+27, which is far too large" in str(
        problem
    )


@pytest.mark.parametrize("rate", [0.0, 1e-3, 50.0])
def test_rate_of_a_training_is_not_told(tmp_path: Path, rate: float) -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = rate
    assert validate_checkpoint(saved(tmp_path, model, optimizer=optimizer), model) == []


# A load that fails late


class Refusing:
    """A scheduler that cannot be loaded, though nothing in the file says so."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def state_dict(self) -> Any:
        return {"value": 1}

    def load_state_dict(self, state: Any) -> None:
        self.loaded.append(state)
        if len(self.loaded) == 1:
            raise RuntimeError("no")


@pytest.mark.parametrize("place", ["scheduler", "scaler", "ema"])
def test_failure_on_the_way_puts_everything_back(tmp_path: Path, place: str) -> None:
    job = Job()
    job.train(2)
    members = {**job.members(), place: Refusing()}
    path = save_checkpoint(tmp_path / "a.ckpt", **members)
    assert path is not None
    other = Job(seed=1)
    other.train(3)
    others = {**other.members(), place: Refusing()}
    before = {name: fingerprint(member) for name, member in others.items()}
    generator = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="no"):
        load_checkpoint(path, **others)
    assert {name: fingerprint(member) for name, member in others.items()} == before
    assert torch.equal(torch.get_rng_state(), generator)


class Interrupted:
    """Tensor.copy_, which is interrupted after so many calls."""

    def __init__(self, patch: pytest.MonkeyPatch, after: int) -> None:
        self._copy, self._left = torch.Tensor.copy_, after
        patch.setattr(torch.Tensor, "copy_", lambda *args: self(*args))

    def __call__(self, *args: Any) -> Any:
        result = self._copy(*args)
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt
        return result


def test_interrupt_while_tensors_are_copied_puts_everything_back(tmp_path: Path) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(30, 50), nn.BatchNorm1d(50), nn.Linear(50, 2))

    path, model = saved(tmp_path, build(0)), build(1)
    before, after = fingerprint(model), 0
    while fingerprint(model) == before:
        after += 1
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            Interrupted(patch, after)
            load_checkpoint(path, model=model)
    assert after > 2 * len(model.state_dict())
    assert values_only(fingerprint(model)) == values_only(fingerprint(build(0)))


def test_tied_weights_that_differ_in_the_file_are_refused(tmp_path: Path) -> None:
    state = Net().state_dict()
    state["head.weight"] = state["head.weight"] + 1
    torch.save(state, tmp_path / "a.pt")
    model = Net()
    problems = found(tmp_path / "a.pt", model=model)
    assert problems["model.head.weight"].kind == "tied"
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "a.safetensors")
    model.scale = None
    for name in ("a.pt", "a.safetensors"):
        (problem,) = validate_checkpoint(tmp_path / name, model)
        assert problem.kind == "tied"
        assert problem.key in ("model.head.weight", "model.second.weight")


def test_weights_that_the_model_ties_must_be_the_same_in_our_file_too(tmp_path: Path) -> None:
    loose = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    path = saved(tmp_path, loose)
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    assert found(path, model=tied)["model.1.weight"].kind == "tied"
    assert [problem.kind for problem in validate_checkpoint(path, tied)] == ["tied"]


def test_lazy_and_meta_models_are_told_what_to_do(tmp_path: Path) -> None:
    path = saved(tmp_path, nn.Linear(2, 2))
    for model, remedy in (
        (nn.LazyLinear(2), "run the model once"),
        (nn.Linear(2, 2, device="meta"), "to_empty"),
    ):
        (first, *_) = validate_checkpoint(path, model)
        assert remedy in first.message


# The forward check


def test_forward_check_finds_what_the_values_do_not_show(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.init.constant_(model[1].weight, 3e38)
    path = saved(tmp_path, model)
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = fingerprint(other)
    with pytest.raises(CheckpointError, match="forward: the output of 1 is not finite"):
        load_checkpoint(path, model=other, forward=torch.ones(2, 3) * 100)
    assert fingerprint(other) == before
    load_checkpoint(path, model=other)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (nn.Sequential(nn.Linear(3, 2)), True),
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2)), True),
        (nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2)), True),
        (nn.Sequential(nn.Linear(3, 2)), (torch.ones(1, 3),)),
        (nn.Linear(3, 2), {"input": torch.ones(1, 3)}),
        (Net(), True),
    ],
)
def test_forward_check_changes_nothing_on_its_own(tmp_path: Path, model: Any, batch: Any) -> None:
    path = saved(tmp_path, model)
    generator, before = torch.get_rng_state(), fingerprint(model)
    assert validate_checkpoint(path, model, forward=batch) == []
    loaded = load_checkpoint(path, model=model, forward=batch)
    assert loaded.warnings == ()
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), generator)


def test_batch_that_does_not_fit(tmp_path: Path) -> None:
    class TwoInputs(nn.Linear):
        def forward(self, x: Any, y: Any) -> Any:
            return super().forward(x) + y

    model = TwoInputs(2, 2)
    path = saved(tmp_path, model)
    (made_up,) = validate_checkpoint(path, model, forward=True)
    assert not made_up.is_error
    (given,) = validate_checkpoint(path, model, forward=torch.ones(1, 2))
    assert given.is_error
    assert "TypeError" in given.message
    nothing = model_of(p_a=[1.0])
    path = saved(tmp_path, nothing)
    (unknown,) = validate_checkpoint(path, nothing, forward=True)
    assert "no batch could be made up" in unknown.message
