"""A vetoed step leaves every byte of parameters and optimizer state as it was."""

from __future__ import annotations

from typing import Any

import pytest
from optimizer_variants import BAD, Recorder, classes, every_variant, image, make, step, variants
from torch.optim import Optimizer

from stayfinite.detect.hooks import watch_steps


def test_the_variants_cover_every_optimizer_of_torch() -> None:
    covered = {param.values[0] for param in variants()}
    assert covered == set(classes())
    assert len(covered) >= 14


@every_variant
@pytest.mark.parametrize("defer", [True, False])
@pytest.mark.parametrize("bad_step", [0, 1, 3])
def test_vetoed_step_leaves_all_bytes(
    cls: type[Optimizer], options: dict[str, Any], bad_step: int, defer: bool
) -> None:
    optimizer, params = make(cls, options)
    with watch_steps(recorder := Recorder(), optimizer=optimizer, defer=defer):
        for i in range(5):
            before = image(optimizer)
            step(optimizer, params, bad=BAD[i % 3] if i == bad_step else None)
            assert (image(optimizer) == before) == (i == bad_step)
            assert all(p.grad is not None for p in params.used)
    assert len(recorder.events) == 1
    assert set(recorder.events) <= {"refused", "late"}


@every_variant
def test_run_goes_on_as_if_the_vetoed_steps_had_not_been(
    cls: type[Optimizer], options: dict[str, Any]
) -> None:
    watched, params = make(cls, options)
    with watch_steps(Recorder()):
        for i in range(8):
            step(watched, params, bad=BAD[i % 3] if i in (0, 3, 4) else None)
    plain, params = make(cls, options)
    for i in range(8):
        if i in (0, 3, 4):
            params.gradients()
        else:
            step(plain, params)
    assert image(watched) == image(plain)


@every_variant
def test_healthy_steps_are_the_same_bytes(cls: type[Optimizer], options: dict[str, Any]) -> None:
    images = []
    for is_watched in (True, False):
        optimizer, params = make(cls, options)
        attachment = watch_steps(recorder := Recorder()) if is_watched else None
        for _ in range(10):
            step(optimizer, params)
        if attachment:
            attachment.remove()
            assert recorder.events == []
        images.append(image(optimizer))
    assert images[0] == images[1]


@every_variant
@pytest.mark.parametrize("by_keyword", [True, False])
def test_gradients_made_by_a_closure_are_judged_after_it(
    cls: type[Optimizer], options: dict[str, Any], by_keyword: bool
) -> None:
    optimizer, params = make(cls, options)
    bad: float | None = None

    def closure() -> float:
        params.fill(bad=bad)
        return 7.0

    with watch_steps(recorder := Recorder()) as attachment:
        for bad in (None, float("nan"), None):
            before = image(optimizer)
            result = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            assert result == 7.0
            assert (image(optimizer) == before) == (bad is not None)
            assert all(p.grad is not None for p in params.used)
        attachment.flush()
        assert len(recorder.events) == 1
