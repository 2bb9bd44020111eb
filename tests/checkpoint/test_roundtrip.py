"""What is saved comes back, to the byte, and training goes on as if it had never stopped."""

from __future__ import annotations

import math
import os
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Job, Net, fingerprint, of_tensor, seed_all, values_only
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from stayfinite.checkpoint import load_checkpoint, save_checkpoint, validate_checkpoint
from stayfinite.errors import CheckpointError, ConfigError, InputError, NonFiniteError


def test_resumed_training_is_the_same_to_the_byte(tmp_path: Path) -> None:
    straight = Job()
    straight.train(5)
    path = straight.save(tmp_path / "last.ckpt")
    expected = straight.train(5)

    resumed = Job(seed=99)
    assert resumed.load(path).step == 5
    assert resumed.train(5) == expected
    assert values_only(resumed.bytes()) == values_only(straight.bytes())


def test_saving_changes_nothing(tmp_path: Path) -> None:
    job = Job()
    job.train(2)
    before, generators = job.bytes(), (random.getstate(), torch.get_rng_state())
    job.save(tmp_path / "last.ckpt")
    assert job.bytes() == before
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[1])


def test_loading_keeps_the_identity_of_tensors(tmp_path: Path) -> None:
    job = Job()
    job.train(2)
    path = job.save(tmp_path / "last.ckpt")
    job.train(1)
    before = {name: p.data_ptr() for name, p in job.model.named_parameters()}
    buffers = {name: b.data_ptr() for name, b in job.model.named_buffers()}
    job.load(path)
    assert before == {name: p.data_ptr() for name, p in job.model.named_parameters()}
    assert buffers == {name: b.data_ptr() for name, b in job.model.named_buffers()}
    assert job.model.head.weight is job.model.second.weight


def test_every_kind_of_tensor_goes_where_the_model_has_it(tmp_path: Path) -> None:
    class Registered(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.scale, self.offset
            self.register_buffer("scale", torch.tensor(0.0))
            self.register_buffer("offset", None, persistent=False)
            decay = self.decay
            del self.decay
            self.decay = decay * 0

    job = Job()
    job.train(2)
    other = Registered()
    load_checkpoint(job.save(tmp_path / "last.ckpt"), model=other)
    for name in ("scale", "offset", "decay"):
        assert of_tensor(getattr(other, name))[3] == of_tensor(getattr(job.model, name))[3]
    assert "scale" in other._buffers
    assert "offset" in other._buffers
    assert "decay" in vars(other)


class Pair(nn.Module):
    """Two layers that may share one weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.other.weight = self.one.weight


@pytest.mark.parametrize("layout", ["ours", "torch"])
def test_weights_that_were_tied_go_to_a_model_in_which_they_are_not(
    tmp_path: Path, layout: str
) -> None:
    tied, loose = Pair(tied=True), Pair(tied=False)
    if layout == "ours":
        save_checkpoint(tmp_path / "a", model=tied)
    else:
        torch.save(tied.state_dict(), tmp_path / "a")
    load_checkpoint(tmp_path / "a", model=loose)
    assert torch.equal(loose.one.weight, tied.one.weight)
    assert torch.equal(loose.other.weight, tied.one.weight)


def test_extra_that_shares_memory_with_the_model_comes_back_whole(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = model.state_dict()
    torch.save({"model": state, "best": {"weight": state["weight"]}}, tmp_path / "a.pt")
    loaded = load_checkpoint(tmp_path / "a.pt", model=nn.Linear(2, 2))
    assert torch.equal(loaded.extra["best"]["weight"], model.weight)


def test_attributes_of_integers_are_saved_and_go_to_attributes_and_buffers(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def __init__(self, *, is_buffer: bool) -> None:
            super().__init__(1, 1)
            seen = torch.tensor([0, 0])
            if is_buffer:
                self.register_buffer("seen", seen)
            else:
                self.seen = seen

    for saved, loaded in ((False, False), (True, False), (False, True)):
        model, other = Counting(is_buffer=saved), Counting(is_buffer=loaded)
        model.seen += 5
        load_checkpoint(save_checkpoint(tmp_path / "a.ckpt", model=model), model=other)
        assert other.seen.tolist() == [5, 5]
    torch.save(Counting(is_buffer=False).state_dict(), tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt", model=other, strict=False).warnings
    load_checkpoint(tmp_path / "a.pt", model=Counting(is_buffer=False))


def test_wrapped_models_have_the_names_of_the_model_inside(tmp_path: Path) -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    path = save_checkpoint(tmp_path / "a.ckpt", model=nn.DataParallel(compiled))
    other = Net()
    load_checkpoint(path, model=other)
    assert values_only(fingerprint(other)) == values_only(fingerprint(model))


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    models = [nn.Linear(2, 3), nn.Linear(3, 2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(1, model.in_features)).sum().backward()
        optimizer.step()
    path = save_checkpoint(tmp_path / "gan.ckpt", model=models, optimizer=optimizers)
    others = [nn.Linear(2, 3), nn.Linear(3, 2)]
    others_optimizers = [torch.optim.Adam(model.parameters()) for model in others]
    load_checkpoint(path, model=others, optimizer=others_optimizers)
    assert others_optimizers[1].param_groups[0]["lr"] == 0.1
    assert torch.equal(others[1].weight, models[1].weight)


SCHEDULERS: dict[str, Any] = {
    "step": lambda o: schedulers.StepLR(o, 2),
    "multi_step": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "constant": lambda o: schedulers.ConstantLR(o),
    "linear": lambda o: schedulers.LinearLR(o),
    "polynomial": lambda o: schedulers.PolynomialLR(o),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "one_cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.StepLR(o, 2)], milestones=[2]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o), schedulers.StepLR(o, 2)]
    ),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    def build() -> tuple[Any, Any, Any]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    model, optimizer, scheduler = build()
    rates(optimizer, scheduler, 3)
    members = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    path = save_checkpoint(tmp_path / "a.ckpt", **members)
    other, other_optimizer, other_scheduler = build()
    load_checkpoint(path, model=other, optimizer=other_optimizer, scheduler=other_scheduler)
    expected = rates(optimizer, scheduler, 6)
    assert rates(other_optimizer, other_scheduler, 6) == expected


OPTIMIZERS: dict[str, Any] = {
    name: getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_optimizer_goes_on_where_it_was(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    def build(seed: int) -> tuple[nn.Module, Any]:
        seed_all(seed)
        model = nn.Linear(4, 3, dtype=dtype)
        return model, OPTIMIZERS[name](model.parameters())

    def step(model: nn.Module, optimizer: Any) -> None:
        x = torch.linspace(-1, 1, 8, dtype=dtype).view(2, 4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = build(0)
    for _ in range(3):
        step(model, optimizer)
    path = save_checkpoint(tmp_path / "a.ckpt", model=model, optimizer=optimizer)
    assert path is not None
    other, other_optimizer = build(1)
    load_checkpoint(path, model=other, optimizer=other_optimizer)
    for each in ((model, optimizer), (other, other_optimizer)):
        step(*each)
    assert values_only(fingerprint(other)) == values_only(fingerprint(model))
    mine, theirs = fingerprint(other_optimizer), fingerprint(optimizer)
    assert values_only(mine) == values_only(theirs)


def test_optimizer_state_keeps_its_own_dtype(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():  # a mixed-precision optimizer with float32 moments
        moments = {"exp_avg": torch.rand(param.shape), "exp_avg_sq": torch.rand(param.shape)}
        optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
    path = save_checkpoint(tmp_path / "a.ckpt", model=model, optimizer=optimizer)
    other = torch.optim.Adam(model.parameters())
    load_checkpoint(path, model=model, optimizer=other)
    for param in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(other.state[param][name], optimizer.state[param][name])


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.uint32, torch.int8, torch.bool, torch.float8_e5m2),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz),
]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5), (1, 1, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.rand(shape).mul(3).to(dtype))
    path = save_checkpoint(tmp_path / "a.ckpt", model=model)
    other = nn.Module()
    other.register_buffer("x", torch.zeros(shape, dtype=torch.float32).to(dtype))
    assert validate_checkpoint(path, other) == []
    load_checkpoint(path, model=other)
    assert values_only(fingerprint(other)) == values_only(fingerprint(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.float8_e4m3fnuz])
def test_bad_values_of_every_dtype_are_seen_without_the_values(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.tensor([1.0, math.nan]).to(dtype))
    path = save_checkpoint(tmp_path / "a.ckpt", model=model, if_bad="aside")
    assert path is not None
    (problem,) = validate_checkpoint(path)
    assert (problem.kind, problem.key) == ("nonfinite", "model.x")


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t(),
        lambda x: x[:, 1:],
        lambda x: x.view(torch.float16)[:, 1::2],
        lambda x: x.flatten()[1:],
        lambda x: x[0].expand(5, -1),
        lambda x: torch.complex(x, x).conj(),
    ],
)
def test_memory_of_any_layout(tmp_path: Path, change: Any) -> None:
    model = nn.Module()
    model.register_buffer("x", change(torch.rand(6, 7)))
    path = save_checkpoint(tmp_path / "a.ckpt", model=model)
    loaded = load_checkpoint(path)
    assert torch.equal(loaded.state["model"]["x"], model.x)


class WithExtraState(nn.Linear):
    seen: Any = None

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "history": torch.arange(3.0)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_extra_state_of_modules(tmp_path: Path) -> None:
    model = nn.Sequential(WithExtraState(2, 2))
    model[0].seen = (1, "two")
    path = save_checkpoint(tmp_path / "a.ckpt", model=model)
    other = nn.Sequential(WithExtraState(2, 2))
    load_checkpoint(path, model=other)
    assert other[0].seen == (1, "two")
    with pytest.raises(CheckpointError, match=r"0\._extra_state: has no place"):
        load_checkpoint(path, model=nn.Sequential(nn.Linear(2, 2)))


def test_recomputed_weights_are_no_state(tmp_path: Path) -> None:
    def build() -> nn.Module:
        with pytest.warns(FutureWarning):
            return torch.nn.utils.weight_norm(nn.Linear(2, 2))

    model = build()
    with torch.no_grad():
        model(torch.ones(1, 2))  # leaves a weight without a graph behind
    other = build()
    load_checkpoint(save_checkpoint(tmp_path / "a.ckpt", model=model), model=other)
    assert torch.equal(other(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "epoch": 3,
        "best": math.inf,
        "nested": {"a": [1, (2, 3.5)], 7: b"bytes", (1, 2): {1, 2}},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "number": np.float32(0.1),
        "counter": Counter("aab"),
        "ordered": OrderedDict(b=1, a=2),
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
        "$tensor": "a name that looks like a tag",
        "tensor": torch.arange(3),
    }
    path = save_checkpoint(tmp_path / "a.ckpt", model=nn.Linear(1, 1), extra=extra)
    loaded = load_checkpoint(path).extra
    assert list(loaded) == list(extra)
    assert torch.equal(loaded.pop("tensor"), extra.pop("tensor"))
    assert np.array_equal(loaded["array"], extra["array"])
    assert loaded.pop("array").dtype == extra.pop("array").dtype
    assert loaded == extra
    assert {key: type(item) for key, item in loaded.items()} == {
        key: type(item) for key, item in extra.items()
    }


def test_unknown_object_is_one_error_that_names_its_path(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    extra = {"config": {"path": [1, Path("x")]}}
    with pytest.raises(CheckpointError, match=r"^extra\.config\.path\.1 is a pathlib") as caught:
        save_checkpoint(path, model=nn.Linear(1, 1), extra=extra)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_model_alone_leaves_the_generators_alone(tmp_path: Path) -> None:
    job = Job()
    other = Net()
    path = job.save(tmp_path / "a.ckpt")
    before = torch.get_rng_state()
    torch.rand(3)
    drawn = torch.get_rng_state()
    load_checkpoint(path, model=other)
    assert torch.equal(torch.get_rng_state(), drawn)
    load_checkpoint(path, model=other, random=True)
    assert torch.equal(torch.get_rng_state(), before)


BAD: dict[str, Any] = {
    "model.first.weight": lambda job: job.model.first.weight.data[0, 0].fill_(math.nan),
    "model.norm.running_mean": lambda job: job.model.norm.running_mean[0].fill_(math.inf),
    "model.decay": lambda job: job.model.decay[0].fill_(math.nan),
    "model.scale": lambda job: job.model.scale.fill_(math.inf),
    "ema.module.first.bias": lambda job: job.ema.module.first.bias.data[0].fill_(-math.inf),
    "optimizer.state.first.weight.exp_avg": lambda job: job.optimizer.state[job.model.first.weight][
        "exp_avg"
    ][0].fill_(math.nan),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_state_is_refused_and_the_old_file_stays(tmp_path: Path, name: str) -> None:
    job = Job()
    job.train(2)
    path = job.save(tmp_path / "last.ckpt")
    before = path.read_bytes()
    BAD[name](job)
    with pytest.raises(NonFiniteError, match=rf"- {name}: holds (NaN|\+Inf|-Inf)"):
        job.save(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_bad_state_is_saved_aside_when_asked(tmp_path: Path) -> None:
    job = Job()
    job.train(1)
    path = job.save(tmp_path / "last.ckpt")
    job.model.scale.fill_(math.nan)
    aside = job.save(path, if_bad="aside")
    assert aside.name == "last.ckpt.nonfinite"
    (problem,) = validate_checkpoint(aside)
    assert problem.key == "model.scale"
    assert validate_checkpoint(path) == []


def test_learning_rate_that_is_no_number_is_refused(tmp_path: Path) -> None:
    job = Job()
    job.optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(CheckpointError, match=r"param_groups\.0\.lr: the learning rate is nan"):
        job.save(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "mask",
    [
        torch.triu(torch.full((4, 4), -math.inf), 1),
        torch.triu(torch.full((4, 4), -math.inf), 1) + torch.arange(4.0),
        torch.full((3,), -math.inf),
    ],
)
def test_masks_may_hold_inf(tmp_path: Path, mask: Tensor) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mask", mask)
    path = save_checkpoint(tmp_path / "a.ckpt", model=model)
    assert validate_checkpoint(path, model) == []
    load_checkpoint(path, model=model)


def test_what_may_be_bad_is_remembered(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("best", torch.tensor(math.inf))
    with pytest.raises(NonFiniteError, match="best"):
        save_checkpoint(tmp_path / "a.ckpt", model=model)
    path = save_checkpoint(tmp_path / "a.ckpt", model=model, nonfinite_ok=["best"])
    load_checkpoint(path, model=model)


def test_model_that_changes_while_it_is_saved_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    path = save_checkpoint(tmp_path / "a.ckpt", model=model)
    assert path is not None
    before, write = path.read_bytes(), os.write

    def spoil_and_write(descriptor: int, data: memoryview) -> int:
        model.weight.data.fill_(math.nan)  # as another thread might
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", spoil_and_write)
    with pytest.raises(CheckpointError, match=r"model\.weight: its bytes are not those"):
        save_checkpoint(path, model=model)
    assert path.read_bytes() == before


def test_ignored_tensors_are_not_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].last_input = torch.ones(3)
    path = save_checkpoint(tmp_path / "a.ckpt", model=model, ignore=["*.last_input"])
    load_checkpoint(path, model=nn.Sequential(nn.Linear(1, 1)))
    path = save_checkpoint(tmp_path / "a.ckpt", model=model)
    load_checkpoint(path, model=nn.Sequential(nn.Linear(1, 1)), ignore=["*.last_input"])
    with pytest.raises(CheckpointError, match=r"model\.0\.last_input: .*no place"):
        load_checkpoint(path, model=nn.Sequential(nn.Linear(1, 1)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 1}, "keep is 1; it must be at least 2"),
        ({"if_bad": "no"}, "if_bad is 'no'; it must be"),
        ({"on_error": "no"}, "on_error is 'no'; it must be"),
        ({"optimizer": 3}, "optimizer is a int; it must be a Optimizer"),
        ({"scaler": 3}, r"scaler is a int; it must have state_dict"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises((ConfigError, InputError), match=message):
        save_checkpoint(tmp_path / "a.ckpt", model=nn.Linear(1, 1), **options)


def test_what_cannot_be_saved_says_so(tmp_path: Path) -> None:
    sparse = nn.Module()
    sparse.register_buffer("x", torch.eye(3).to_sparse())
    with pytest.raises(CheckpointError, match=r"model\.x is not a dense tensor"):
        save_checkpoint(tmp_path / "a.ckpt", model=sparse)
    with pytest.raises(CheckpointError, match="meta device"):
        save_checkpoint(tmp_path / "a.ckpt", model=nn.Linear(1, 1, device="meta"))
    with pytest.raises(CheckpointError, match="run the model once"):
        save_checkpoint(tmp_path / "a.ckpt", model=nn.LazyLinear(1))
    with pytest.raises(InputError, match="is a folder"):
        save_checkpoint(tmp_path, model=nn.Linear(1, 1))


def test_entry_of_state_dict_that_we_would_miss_is_an_error(tmp_path: Path) -> None:
    class Packed(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "packed"] = torch.ones(2)

    with pytest.raises(CheckpointError, match=r"model\.packed is in the state_dict"):
        save_checkpoint(tmp_path / "a.ckpt", model=Packed(1, 1))
