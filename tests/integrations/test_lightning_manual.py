"""Lightning with manual optimization: each optimizer's update is judged on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from as_before import torch_as_before as torch_as_before
from framework_nets import few_objects as few_objects
from torch import Tensor, nn

pytest.importorskip("lightning", reason="Lightning is not installed")

import lit
from lightning import LightningModule
from lit import BAD, batches, callback, fit, made_net, state, without

PRECISIONS = ["32-true", "fp16"]


class Manual(lit.Net):
    """One optimizer that makes an update every so many batches."""

    def __init__(self, *, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every = every

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.layers(batch).mean()
        self.manual_backward(loss / self.every)
        if batch_idx % self.every == self.every - 1:
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()
        self.log("loss", loss, on_epoch=True)


class Pair(LightningModule):
    """Two optimizers, as in a GAN; `without` is a batch in which only the first one works."""

    def __init__(self, *, without: int | None = None, toggles: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.without, self.toggles = without, toggles
        self.steps: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        for number, loss_of in enumerate((self.loss_of_first, self.loss_of_second)):
            if number and batch_idx == self.without:
                continue
            if self.toggles:
                self.toggle_optimizer(optimizers[number])
            loss = loss_of(batch)
            optimizers[number].zero_grad()
            self.manual_backward(loss)
            optimizers[number].step()
            if self.toggles:
                self.untoggle_optimizer(optimizers[number])
            schedulers[number].step()
            self.log(f"loss{number}", loss)
        self.steps.append(self.global_step)

    def loss_of_first(self, batch: Tensor) -> Tensor:
        return self.first(batch).square().mean()

    def loss_of_second(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch)
        return torch.log(self.second(hidden).square().mean() + batch[:, 0]).mean()

    def configure_optimizers(self) -> Any:
        made = [torch.optim.Adam(each.parameters(), lr=0.01) for each in self.children()]
        return made, [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in made]


class Often(lit.Net):
    """Several updates of one optimizer in each batch."""

    def __init__(self) -> None:
        super().__init__(schedule=None)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for _ in range(3):
            loss = self.layers(batch).mean()
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("every", [1, 2])
def test_bad_batch_leaves_no_trace(precision: str, every: int) -> None:
    window = range(BAD - BAD % every, BAD - BAD % every + every)
    watching = callback()
    watched = fit(made_net(Manual, every=every), batches(bad=[BAD]), watching, precision=precision)
    plain = fit(made_net(Manual, every=every), without(batches(), *window), precision=precision)
    after, expected = state(watched), state(plain)
    if every > 1:  # what was logged in the batch before was shown by then
        del after["metrics"], expected["metrics"]
    assert after == expected
    (incident,) = watching.incidents
    assert incident.origin is not None
    assert incident.origin.op == "aten.log.default"
    assert incident.origin.module == "layers"


@pytest.mark.parametrize("toggles", [True, False])
def test_only_the_bad_update_of_two_is_left_out(toggles: bool) -> None:
    watching = callback()
    watched = fit(made_net(Pair, toggles=toggles), batches(bad=[BAD]), watching)
    made = batches(bad=[BAD])
    plain = fit(made_net(Pair, toggles=toggles, without=BAD), made)
    after, expected = state(watched), state(plain)
    shown = after.pop("metrics"), expected.pop("metrics")
    assert after == expected
    assert shown[0]["loss0"] == shown[1]["loss0"]
    assert watched.lightning_module.steps == plain.lightning_module.steps
    assert all(param.requires_grad for param in watched.lightning_module.parameters())
    (incident,) = watching.incidents
    assert incident.step == BAD
    assert incident.origin is not None
    assert "torch.log(" in incident.origin.code


def test_gradients_of_the_other_optimizer_survive() -> None:
    class Together(Pair):
        """One backward pass for both; the gradient of the second is bad in one batch."""

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            first.zero_grad()
            second.zero_grad()
            used = self.second.weight if self.without is None else self.second.weight.detach()
            bad = torch.sqrt(used.square().sum() * (batch_idx != BAD))
            self.manual_backward(self.first(batch).square().mean() + bad * (batch_idx == BAD))
            second.step()
            first.step()

    watched = fit(made_net(Together), batches(), callback())
    plain = fit(made_net(Together, without=0), batches())
    assert lit.is_finite(watched.lightning_module)
    for name, tensor in watched.lightning_module.first.state_dict().items():
        assert torch.equal(tensor, plain.lightning_module.first.state_dict()[name])


def test_several_bad_updates_in_one_batch_leave_no_trace() -> None:
    watching = callback()
    watched = fit(made_net(Often), batches(bad=[BAD]), watching)
    plain = fit(made_net(Often), without(batches(), BAD))
    assert state(watched) == state(plain)
    assert [incident.step for incident in watching.incidents] == [15, 16, 17]


def test_updates_of_the_bare_optimizer_are_judged_too() -> None:
    class Bare(Manual):
        def optimizers(self, use_pl_optimizer: bool = False) -> Any:
            return super().optimizers(use_pl_optimizer=False)

    watching = callback()
    watched = fit(made_net(Bare), batches(bad=[BAD]), watching)
    plain = fit(made_net(Bare), without(batches(), BAD))
    assert state(watched) == state(plain)
    assert watched.global_step == 0  # Lightning does not count them
    assert watching.incidents[0].origin is not None
