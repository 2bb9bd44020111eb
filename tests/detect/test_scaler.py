"""Under a GradScaler: its own skips are benign, what it does not see is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_variants import Parameters, Recorder, image, make, variants
from torch.optim import Optimizer

from stayfinite.detect.hooks import watch_scalers, watch_steps

# A GradScaler takes no closures, so no LBFGS.
amp_variants = pytest.mark.parametrize(
    ("cls", "options"), [v for v in variants() if v.values[0] is not torch.optim.LBFGS]
)


def scaled_step(
    scaler: Any, optimizer: Optimizer, params: Parameters, *, unscale: bool, bad: Any = None
) -> None:
    scaler.scale(torch.ones(()))  # makes the scale
    params.fill(bad=bad)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@amp_variants
@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("bad_step", [0, 2])
def test_overflow_that_the_scaler_absorbs_is_no_bad_step(
    cls: type[Optimizer], options: dict[str, Any], unscale: bool, bad_step: int
) -> None:
    optimizer, params = make(cls, options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    recorder = Recorder()
    with watch_steps(recorder), watch_scalers(recorder):
        for i in range(4):
            before = image(optimizer)
            bad = float("inf") if i == bad_step else None
            scaled_step(scaler, optimizer, params, unscale=unscale, bad=bad)
            assert (image(optimizer) == before) == (i == bad_step)
    assert recorder.events == ["scaler"]
    assert scaler.get_scale() == 2.0


@amp_variants
@pytest.mark.parametrize("bad_step", [0, 2])
def test_gradient_gone_bad_after_unscale_is_a_bad_step(
    cls: type[Optimizer], options: dict[str, Any], bad_step: int
) -> None:
    optimizer, params = make(cls, options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    recorder = Recorder()
    with watch_steps(recorder), watch_scalers(recorder):
        for i in range(4):
            scaler.scale(torch.ones(()))
            params.fill()
            scaler.unscale_(optimizer)
            if i == bad_step:
                params.used[0].grad.mul_(float("nan"))
            before = image(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert (image(optimizer) == before) == (i == bad_step)
    assert len(recorder.events) == 1
    assert recorder.events[0] in ("refused", "late")


@amp_variants
def test_scale_that_fell_to_zero_does_not_reach_the_weights(
    cls: type[Optimizer], options: dict[str, Any]
) -> None:
    optimizer, params = make(cls, options)
    with watch_steps(recorder := Recorder()):
        scaled_step(torch.amp.GradScaler("cpu"), optimizer, params, unscale=False)
        before = image(optimizer)
        broken = torch.amp.GradScaler("cpu", init_scale=0.0)
        scaled_step(broken, optimizer, params, unscale=False)
        assert image(optimizer) == before
    assert len(recorder.events) == 1
