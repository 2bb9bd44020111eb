"""Our failure is a line in the log, theirs is theirs, and nothing stays hidden."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from optimizer_variants import NAN, Parameters, Recorder, fresh, image, step
from torch.optim import SGD, Adam

from stayfinite.detect.hooks import watch_steps
from stayfinite.errors import TrainingAbortedError


class Failing(Recorder):
    """Our own bug, at one of the calls."""

    def __init__(self, where: str) -> None:
        super().__init__()
        for name in where.split():
            setattr(self, name, self._fail)

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("our own bug")


@pytest.mark.parametrize("where", ["judge", "refused", "stepped", "judge refused stepped"])
@pytest.mark.parametrize("fused", [True, False])
def test_our_own_failure_is_logged_once_and_never_theirs(
    where: str, fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, params = fresh(fused=fused)
    with caplog.at_level(logging.ERROR, logger="stayfinite"), watch_steps(Failing(where)):
        for bad in (None, NAN, None, NAN):
            step(optimizer, params, bad=bad)
            assert all(p.grad is not None for p in params.used)
    assert [record.name for record in caplog.records] == ["stayfinite"]
    if where == "refused":
        assert all(torch.isfinite(p).all() for p in params.used)


class Aborting(Recorder):
    def refused(self, optimizer: Any, gradients: Any, *, late: bool) -> bool:
        raise TrainingAbortedError("stop")


def test_abort_leaves_before_the_weights_are_touched() -> None:
    optimizer, params = fresh(Adam)
    step(optimizer, params)
    before = image(optimizer)
    with watch_steps(Aborting()), pytest.raises(TrainingAbortedError):
        step(optimizer, params, bad=NAN)
    assert image(optimizer) == before
    assert all(p.grad is not None for p in params.used)


class Raising(SGD):
    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise KeyError("the user's own")
        return super().step(closure)


def raising() -> tuple[Raising, Parameters]:
    params = Parameters(Raising)
    return Raising(params.all, lr=0.1), params


@pytest.mark.parametrize("given_back_by", ["remove", "next step"])
def test_gradients_are_given_back_when_step_raises(given_back_by: str) -> None:
    optimizer, params = raising()
    before = image(optimizer)
    with watch_steps(recorder := Recorder()):
        with pytest.raises(KeyError):
            step(optimizer, params, bad=NAN)
        assert params.used[0].grad is None
        if given_back_by == "next step":
            optimizer.fails = False
            optimizer.step()
            assert recorder.events == ["refused", "refused"]
            assert image(optimizer) == before
    assert all(p.grad is not None for p in params.used)


def test_new_gradients_are_kept_when_the_last_step_raised() -> None:
    optimizer, params = raising()
    with watch_steps(recorder := Recorder()):
        with pytest.raises(KeyError):
            step(optimizer, params, bad=NAN)
        optimizer.fails = False
        step(optimizer, params)
    assert recorder.events == ["refused"]
    assert all(torch.isfinite(p.grad).all() for p in params.used)


def test_flag_is_taken_away_when_a_fused_step_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, params = fresh(Adam, fused=True)
    with watch_steps(recorder := Recorder()):
        step(optimizer, params)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["torch.optim.adam"], "_fused_adam", None)
            with pytest.raises(TypeError):
                step(optimizer, params)
        assert "found_inf" in vars(optimizer)
        step(optimizer, params, bad=NAN)
        step(optimizer, params)
        assert "found_inf" not in vars(optimizer)
    assert recorder.events == ["late"]
