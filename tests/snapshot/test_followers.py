"""Schedulers, scalers, averages and loaders go back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moments import Sampled, in_bytes
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, RandomSampler

from stayfinite.snapshot import TrainingState


class Warmup:
    """A factor with a memory of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + self.calls)


def _sequential(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def _chained(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer), _sequential(optimizer)]
    return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, Warmup()),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, step_size_up=2),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=9),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "swa": lambda o: SWALR(o, 0.05, anneal_epochs=3),
    "sequential": _sequential,
    "chained": _chained,
}


def callable_states(scheduler: Any) -> Any:
    return [fn.calls for fn in getattr(scheduler, "lr_lambdas", []) if isinstance(fn, Warmup)]


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("means", ["snapshot", "mark"])
def test_scheduler_goes_back_and_on(kind: str, means: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[kind](optimizer)
    losses = (3.0, 4.0, 5.0, 2.0)

    def step(loss: float) -> None:
        optimizer.step()
        scheduler.step(loss) if kind == "plateau" else scheduler.step()

    def now() -> Any:
        return in_bytes(
            [scheduler.state_dict(), optimizer.param_groups, callable_states(scheduler)]
        )

    step(2.5)
    state = TrainingState(None, optimizer, scheduler=scheduler)
    is_mark = means == "mark"
    take, back = (state.mark, state.go_back) if is_mark else (state.capture, state.restore)
    before, kept = now(), take()
    after = [(step(loss), now())[1] for loss in losses]
    assert before not in after
    back(kept)
    assert now() == before
    assert [(step(loss), now())[1] for loss in losses] == after


def test_best_loss_of_a_plateau_scheduler_may_be_infinite() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
    state = TrainingState(None, optimizer, scheduler=scheduler)
    snapshot = state.capture()
    scheduler.step(1.0)
    state.restore(snapshot)
    assert scheduler.best == float("inf")


def scaled(scaler: Any, bad: bool = False) -> tuple[nn.Linear, Optimizer, Callable[[], None]]:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        loss = net(torch.ones(1, 2)).sum() * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return net, optimizer, step


@pytest.mark.parametrize("means", ["snapshot", "mark"])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_scaler_goes_back_and_on(means: str, bad: bool, steps: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    net, optimizer, step = scaled(scaler, bad)
    for _ in range(steps):
        step()

    def now() -> Any:
        held = {key: value for key, value in vars(scaler).items() if "per_opt" not in key}
        return in_bytes([held, list(scaler._per_optimizer_states.values())])

    state = TrainingState(net, optimizer, scaler=scaler)
    is_mark = means == "mark"
    take, back = (state.mark, state.go_back) if is_mark else (state.capture, state.restore)
    before, tensors, kept = now(), (scaler._scale, scaler._growth_tracker), take()
    step()
    after = now()
    assert after != before
    back(kept)
    assert now() == before
    assert (scaler._scale, scaler._growth_tracker) == tensors
    step()
    assert now() == after


def test_scaler_goes_back_to_before_its_unscaling() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    net, optimizer, _ = scaled(scaler)
    state = TrainingState(net, optimizer, scaler=scaler)
    mark = state.mark()
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    state.go_back(mark)
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)  # a second time would be an error


class Hidden:
    """A state that can only be had by asking."""

    __slots__ = ("_cell",)

    def __init__(self) -> None:
        self._cell = SimpleNamespace(scale=8.0)

    def halve(self) -> None:
        self._cell.scale /= 2

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._cell.scale, "history": [torch.ones(1)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cell.scale = state["scale"]


@pytest.mark.parametrize("role", ["scaler", "scheduler", "ema", "loader"])
def test_anything_that_gives_and_takes_its_state_goes_back(role: str) -> None:
    member = Hidden()
    state = TrainingState(nn.Linear(1, 1), **{role: member})
    snapshot = state.capture()
    member.halve()
    state.restore(snapshot)
    assert member.state_dict()["scale"] == 8.0


class Shadow:
    """An average as people write it: a list of tensors in an object."""

    def __init__(self, params: Iterator[Tensor]) -> None:
        self.shadow, self.updates = [p.detach().clone() for p in params], 0

    def update(self, params: Iterator[Tensor]) -> None:
        self.updates += 1
        for mine, param in zip(self.shadow, params, strict=True):
            mine.lerp_(param.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


class Holder:
    """An average that holds a module, as timm's does."""

    def __init__(self, net: nn.Module) -> None:
        self.module = AveragedModel(net)


def averages(net: nn.Module) -> dict[str, tuple[Any, Callable[[], None]]]:
    model, shadow, holder = AveragedModel(net), Shadow(net.parameters()), Holder(net)
    by_name = {name: p.detach().clone() for name, p in net.named_parameters()}
    listed = [p.detach().clone() for p in net.parameters()]
    return {
        "AveragedModel": (model, lambda: model.update_parameters(net)),
        "shadow": (shadow, lambda: shadow.update(net.parameters())),
        "holder": (holder, lambda: holder.module.update_parameters(net)),
        "dict": (by_name, lambda: by_name["weight"].add_(1)),
        "list": (listed, lambda: listed[0].add_(1)),
    }


@pytest.mark.parametrize("kind", ["AveragedModel", "shadow", "holder", "dict", "list"])
def test_average_goes_back_in_place(kind: str) -> None:
    net = nn.Linear(3, 3)
    ema, update = averages(net)[kind]

    def tensors() -> list[Tensor]:
        if isinstance(ema, (dict, list)):
            return list(ema.values() if isinstance(ema, dict) else ema)
        held = {"AveragedModel": lambda: ema, "holder": lambda: ema.module}.get(kind)
        return list(held().state_dict(keep_vars=True).values()) if held else ema.shadow

    update()
    net.weight.data.add_(1)
    state = TrainingState(net, ema=ema)
    snapshot = state.capture(parts=("ema",))
    before, where = in_bytes(tensors()), [(id(t), t.data_ptr()) for t in tensors()]
    weight = in_bytes(net.weight)
    update()
    assert in_bytes(tensors()) != before
    net.weight.data.add_(1)
    state.restore(snapshot)
    assert in_bytes(tensors()) == before
    assert [(id(t), t.data_ptr()) for t in tensors()] == where
    assert in_bytes(net.weight) != weight  # only the average was kept


def test_average_in_an_object_is_kept_once() -> None:
    net = nn.Linear(10, 10)
    state = TrainingState(net, ema=Shadow(net.parameters()))
    assert state.capture(parts=("ema",)).nbytes == 4 * 110


def test_loader_may_stay_where_it_is() -> None:
    loader = Sampled()
    state = TrainingState(nn.Linear(1, 1), loader=loader)
    next(loader)
    snapshot = state.capture()
    next(loader)
    state.restore(snapshot, rewind_loader=False)
    assert loader.position == 2
    state.restore(snapshot)
    assert loader.position == 1


def test_generators_of_a_plain_loader_go_back_with_it_only() -> None:
    generator = torch.Generator().manual_seed(3)
    sampler = RandomSampler(range(8), generator=generator)
    loader = DataLoader(range(8), sampler=sampler, generator=torch.Generator())
    state = TrainingState(nn.Linear(1, 1), loader=loader)
    snapshot, mark = state.capture(), state.mark()
    first = [int(x) for x in loader]
    state.go_back(mark)
    assert [int(x) for x in loader] != first
    state.restore(snapshot)
    assert [int(x) for x in loader] == first


class Secretive:
    """Numbers that are seen, and one that can only be had by asking."""

    def __init__(self) -> None:
        self.rates, self._hidden = [0.1], iter(range(9))
        self._count = Hidden()

    def step(self) -> None:
        self.rates = [self.rates[0] / 2]
        self._count.halve()

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates, "hidden": self._count.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = state["rates"]
        self._count.load_state_dict(state["hidden"])


def test_scheduler_of_another_make_is_asked_in_every_step() -> None:
    scheduler = Secretive()
    state = TrainingState(nn.Linear(1, 1), scheduler=scheduler)
    for _ in range(3):
        before, mark = repr(scheduler.state_dict()), state.mark()
        scheduler.step()
        state.go_back(mark)
        assert repr(scheduler.state_dict()) == before
        scheduler.step()
