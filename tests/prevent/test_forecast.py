"""Forecasts: trends and spikes as properties, a training that is watched, and what is done."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.modules.module as torch_module
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stayfinite
from stayfinite.cli import main
from stayfinite.guard.guard import with_announcement
from stayfinite.prevent.forecast.divergence import FEATURES, learned
from stayfinite.prevent.forecast.forecaster import Forecaster
from stayfinite.prevent.forecast.outlook import (
    Outlook,
    Pace,
    Row,
    ScaleWatch,
    SpikeDetector,
    Trend,
    TrendRules,
    climb,
    foretold,
    median_slope,
    possible_forecasts,
    time_left,
)
from stayfinite.prevent.forecast.signals import ModuleOutputs, SignalSampler
from stayfinite.records import Diagnosis, Forecast, Incident, Signal
from stayfinite.recover.config import RecoveryConfig
from stayfinite.text import forecast_words

HALF_MAX = 65504.0
slopes = st.floats(0.01, 4.0)
rooms = st.floats(1.0, 128.0)
growths = st.floats(-0.2, 1.0)


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled() -> None:
    """Where another test has compiled something, activations would not be measured."""
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()


@given(rooms, slopes, growths)
def test_time_left_is_when_the_room_is_used_up(room: float, slope: float, growth: float) -> None:
    left = time_left(room, slope, growth)
    if not math.isfinite(left) or left > 1e6:
        return
    if abs(growth) * room < 1e-3 * slope:
        used = slope * left
    elif growth > 0:
        used = slope * math.expm1(growth * left) / growth
    else:
        used = slope / -growth * math.log1p(-growth * left)
    assert used == pytest.approx(room, rel=1e-2)


@given(rooms, slopes, st.floats(0.0, 0.5), st.floats(0.01, 0.5))
def test_faster_growth_leaves_less_time(
    room: float, slope: float, growth: float, more: float
) -> None:
    assert time_left(room, slope, growth + more) <= time_left(room, slope, growth) * 1.001


@given(slopes, st.integers(5, 16), st.data())
def test_a_spike_does_not_throw_off_the_slope(slope: float, count: int, data: Any) -> None:
    at = np.arange(float(count))
    values = slope * at
    values[data.draw(st.integers(0, count - 1))] = data.draw(st.floats(-1e3, 1e3))
    clean = median_slope(at, slope * at)
    assert median_slope(at, values) == pytest.approx(clean, abs=slope)
    assert math.copysign(1, median_slope(at, values)) == 1.0 or count < 6


@given(st.lists(st.floats(0.5, 2.0), min_size=40, max_size=80), st.data())
def test_spike_is_found_whatever_was_not_finite_before(usual: list[float], data: Any) -> None:
    detector = SpikeDetector()
    bad = st.sampled_from([math.nan, math.inf, -math.inf])
    for value in usual:
        if data.draw(st.booleans()):
            assert not detector.add(data.draw(bad))
        detector.add(value)
    assert math.isfinite(detector.limit)
    assert detector.add(1e6)
    assert not detector.add(1e6), "one onset is told once"


def test_a_new_level_is_no_spike_for_long() -> None:
    detector = SpikeDetector()
    noise = random.Random(0)
    found = [detector.add(1 + 0.1 * noise.random()) for _ in range(64)]
    found += [detector.add(50 + noise.random()) for _ in range(200)]
    assert sum(found) == 1
    assert detector.usual > 40, "the window has begun anew"


def outlooks(
    sizes: list[float],
    *,
    limit: float = HALF_MAX,
    rows: int = 1,
    rules: TrendRules | None = None,
) -> list[Trend]:
    """What is told of a row with these sizes (in doublings), when its samples are asked for."""
    outlook = Outlook(
        [Row(signal="activation", dtype="float16", limit=limit)] * rows, rules or TrendRules()
    )
    told = []
    for step, size in enumerate(sizes):
        if outlook.is_due(step):
            values = np.full(rows, 2.0**size if math.isfinite(size) else math.nan)
            trend = outlook.learn(step, np.arange(rows), values)
            if trend is not None:
                told.append(trend)
    return told


@pytest.mark.parametrize("slope", [0.02, 0.05, 0.1])
def test_steady_growth_is_told_once_with_the_true_end_in_its_interval(slope: float) -> None:
    noise = random.Random(1)
    flat = [2.0 + 0.05 * noise.random() for _ in range(200)]
    rise = [2.0 + slope * n + 0.05 * noise.random() for n in range(int(13.9 / slope))]
    end = 200 + 14.0 / slope
    (trend,) = outlooks(flat + rise)
    assert trend.step <= end - 20
    assert trend.step + trend.low <= end <= trend.step + trend.high


@given(st.integers(0, 2**32))
def test_noise_is_never_told(seed: int) -> None:
    noise = np.random.default_rng(seed)
    assert outlooks(list(noise.normal(0.0, 0.5, 400)), rows=3) == []


def test_one_spike_and_one_nan_are_no_trend() -> None:
    sizes = [1.0] * 300
    sizes[160], sizes[176] = 12.0, math.nan
    assert outlooks(sizes) == []


def test_growth_that_ends_long_before_the_limit_is_not_told() -> None:
    sizes = [2 * (1 - math.exp(-n / 60)) for n in range(400)]
    assert outlooks(sizes) == []


def test_loss_scale_that_halves_on_and_on_is_told_but_not_its_search_at_the_beginning() -> None:
    watch, told = ScaleWatch(), []
    scale = 2.0**16
    for step in range(6):  # it looks for its scale
        told.append(watch.stepped(step, skipped=True, scale=scale))
        scale /= 2
    for step in range(6, 60):
        told.append(watch.stepped(step, skipped=False, scale=None))
    assert told == [None] * 60
    for step in range(60, 69):
        skipped = step % 2 == 0
        told.append(watch.stepped(step, skipped=skipped, scale=scale))
        scale = scale / 2 if skipped else scale
    (forecast,) = [each for each in told if each is not None]
    assert forecast.signal == "loss_scale"
    assert forecast.steps_low is not None
    assert forecast.steps_high is not None
    assert forecast.steps_low <= 2 * math.log2(forecast.value or 0.0) <= forecast.steps_high


def test_scaler_that_doubles_often_is_where_it_was_however_often_it_skips() -> None:
    watch, told = ScaleWatch(), []
    scale = 2.0**16
    for step in range(400):
        skipped = step >= 20 and step % 7 == 0  # it has doubled, and that was too much
        told.append(watch.stepped(step, skipped=skipped, scale=2 * scale if skipped else None))
    assert told == [None] * 400


@given(st.lists(st.floats(-1.0, 1.0), min_size=16, max_size=24), st.floats(2.0, 60.0), st.data())
def test_a_jump_to_another_level_is_no_climb(noise: list[float], jump: float, data: Any) -> None:
    at = data.draw(st.integers(4, len(noise)))
    values = [0.01 * value + (jump if n >= at else 0.0) for n, value in enumerate(noise)]
    without_jump, _ = climb(values)
    assert without_jump < 0.05


@given(st.lists(st.floats(-0.2, 0.2), min_size=16, max_size=64), st.floats(0.5, 4.0))
def test_what_doubles_on_and_on_is_a_climb(noise: list[float], slope: float) -> None:
    rise = [slope * (n + 1) for n in range(6)]
    without_jump, with_jump = climb([*noise, *rise])
    assert with_jump >= without_jump >= 5 * slope - 0.4 - 1e-9


def both(losses: list[float], tops: list[float]) -> list[Trend]:
    """What is told of a loss and an activation of float32, both in doublings."""
    limit = float(np.finfo("f4").max)
    rows = [Row(signal="activation", dtype="float32", limit=limit), Row(signal="loss", limit=limit)]
    outlook, told = Outlook(rows), []
    for step, (loss, top) in enumerate(zip(losses, tops, strict=True)):
        is_due = outlook.is_due(step)
        outlook.saw_loss(step, 2.0**loss)
        if is_due:
            trend = outlook.learn(step, np.arange(2), np.array([2.0**top, 2.0**loss]))
            if trend is not None:
                told.append(trend)
    return told


@pytest.mark.parametrize("quiet", [12, 120])
def test_loss_and_activations_that_climb_together_are_told_also_while_it_warms_up(
    quiet: int,
) -> None:
    """Faster than exponentially, as float32 ends: most of the way is made in the last steps."""
    noise = random.Random(3)
    flat = [0.1 * noise.random() for _ in range(quiet)]
    left = [20 / (20 - n) for n in range(20)]  # 1 / (steps that are left)
    losses = flat + [4 * (each - 1) for each in left]
    tops = flat + [2 * (each - 1) for each in left]
    told = both(losses, tops)
    assert told, "nothing was told"
    end = quiet + 20
    assert told[0].step <= end - 5
    assert told[0].step + told[0].low <= end <= told[0].step + told[0].high


def test_activation_of_which_any_batch_may_overflow_is_told_though_it_does_not_rise() -> None:
    noise = random.Random(5)
    told = outlooks([14.5 + 0.4 * noise.random() for _ in range(300)])
    assert told[0].step < 8, "room for 1.5 doublings in float16"
    assert len(told) > 1, "again, as long as it is so"
    assert outlooks([11.0 + 0.4 * noise.random() for _ in range(300)]) == []


@pytest.mark.parametrize("falls", [False, True])
def test_activations_that_grow_while_the_loss_falls_are_learning(falls: bool) -> None:
    """The same growth with a loss that does not fall is told."""
    rows = [Row(signal="activation", dtype="float16", limit=HALF_MAX), Row(signal="loss")]
    outlook, told = Outlook(rows), []
    for step in range(130):
        loss = 2.0 ** (-0.05 * step if falls else 0.0)
        is_due = outlook.is_due(step)
        outlook.saw_loss(step, loss)
        if is_due:
            size = 2.0 ** min(0.1 * step, 11.0)
            told.append(outlook.learn(step, np.arange(2), np.array([size, loss])))
    assert any(told) != falls


@pytest.mark.parametrize("alone", ["loss", "activation"])
def test_climb_of_one_signal_far_from_its_end_is_not_told_while_it_warms_up(alone: str) -> None:
    flat = [0.05 * (n % 3) for n in range(32)]
    rise = flat[:16] + [0.4 * (n + 1) for n in range(16)]
    assert both(*((rise, flat) if alone == "loss" else (flat, rise))) == []


def test_a_jump_to_another_level_is_not_told() -> None:
    """Rewards that come late, or another set of data: all is larger from one step to the next."""
    noise = random.Random(19)
    losses = [-8 + 0.6 * noise.random() for _ in range(201)]
    losses += [1.5 * noise.random() for _ in range(24)]
    tops = [0.1 * noise.random() for _ in losses]
    assert both(losses, tops) == []


class Pulled(nn.Module):
    """An embedding that a loss without a bound makes larger and larger, in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 16)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return self.words(a) @ self.words(b).T


def pull(model: Pulled, generator: torch.Generator) -> Tensor:
    a = torch.randint(24, (32,), generator=generator)
    return -model(a, (a + 1) % 24).diagonal().float().mean()


def train(
    *, steps: int = 300, rate: float = 0.3, config: RecoveryConfig | None = None, **more: Any
) -> tuple[Pulled, stayfinite.Guard]:
    torch.manual_seed(0)
    model, generator = Pulled(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with stayfinite.watch(
        model,
        optimizer,
        sinks=[],
        on_nan="warn" if config is None else "recover",
        config=config,
        again="never",
        **more,
    ) as guard:
        for _ in range(steps):
            optimizer.zero_grad()
            pull(model, generator).backward()
            optimizer.step()
            if guard.incidents:
                break
    return model, guard


def test_overflow_is_foretold_with_module_dtype_and_time_and_the_incident_says_so() -> None:
    _, guard = train(forecast=True)
    forecast = next(each for each in guard.forecasts if not each.is_spike)
    (incident,) = guard.incidents
    assert (forecast.dtype, forecast.limit) == ("float16", HALF_MAX)
    assert forecast.steps_low is not None
    assert forecast.steps_high is not None
    ahead = incident.step - forecast.step
    assert ahead >= 5
    assert forecast.steps_low <= ahead <= forecast.steps_high
    assert "float16 in about" in forecast.message
    known = Diagnosis(cause="low_precision_overflow", why="", fix="", evidence=("older",))
    explained = with_announcement(dataclasses.replace(incident, diagnosis=known), guard.forecasts)
    assert explained.diagnosis is not None
    assert f"announced {ahead} steps before" in explained.diagnosis.evidence[0]
    assert explained.diagnosis.evidence[1:] == ("older",)


@pytest.mark.parametrize(
    ("signal", "cause", "is_said"),
    [
        ("divergence", "lr_too_high", True),
        ("divergence", "low_precision_overflow", True),
        ("divergence", "exp_overflow", True),
        ("divergence", "bad_input_data", False),
        ("divergence", "log_of_zero", False),
        ("divergence", "unknown", False),
        ("loss", "bad_input_data", True),
    ],
)
def test_divergence_announces_only_what_a_divergence_ends_in(
    signal: Signal, cause: str, is_said: bool
) -> None:
    told = Forecast(step=9, signal=signal, steps_left=84, steps_low=3, steps_high=277)
    known = Incident(step=10, diagnosis=Diagnosis(cause=cause, why="", fix=""))
    explained = with_announcement(known, [told]).diagnosis
    assert explained is not None
    said = (f"announced 1 step before: {forecast_words(told)}",)
    assert explained.evidence == (said if is_said else ())


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 4))


def healthy(model: nn.Module, *, forecast: bool) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(5)
    with stayfinite.watch(model, optimizer, sinks=[], on_nan="warn", forecast=forecast) as guard:
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.randn(16, 8)), torch.zeros(16, 4)).backward()
            optimizer.step()
    assert guard.forecasts == []
    return {**model.state_dict(), "random": torch.get_rng_state()}


def test_healthy_training_is_bit_identical_and_no_hook_is_left() -> None:
    without, with_it = (healthy(small(), forecast=which) for which in (False, True))
    assert without.keys() == with_it.keys()
    assert all(torch.equal(without[key], with_it[key]) for key in without)
    assert not torch_module._global_forward_hooks


class HostReads(TorchDispatchMode):
    READS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.item.default,
        torch.ops.aten.is_nonzero.default,
    )
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.READS
        return func(*args, **(kwargs or {}))


def test_no_number_is_read_in_a_step_because_of_a_forecast() -> None:
    counts = []
    for is_forecast in (False, True):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        forecaster = Forecaster(model)
        x = torch.randn(16, 8)
        with HostReads() as reads:
            for _ in range(40):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if is_forecast:
                    forecaster.stepped(optimizer, loss=1.0)
        forecaster.close()
        counts.append(reads.count)
    assert counts[0] == counts[1]


class Attending(nn.Module):
    """Attention by torch's own function, or by hand with a mask and a softmax."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.q, self.k, self.by_hand = nn.Linear(4, 4), nn.Linear(4, 4), by_hand

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        if not self.by_hand:
            return nn.functional.scaled_dot_product_attention(q, k, x)
        self.logits = q @ k.transpose(-2, -1)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return nn.functional.softmax(self.logits.masked_fill(hidden, -math.inf), dim=-1) @ x


def sampled(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> dict[str, float]:
    """What one sampled step of a training measures, by signal; the largest of each."""
    sampler = SignalSampler(ModuleOutputs(model))
    sampler.open(optimizer)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    sampler.take(optimizer, step=0)
    (reading,) = sampler.ready()
    found: dict[str, float] = {}
    for row, value in zip(reading.rows, reading.values, strict=True):
        signal = sampler.rows[row].signal
        found[signal] = max(found.get(signal, 0.0), float(value))
    return found


def test_update_is_measured_against_the_weights() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4, bias=False), torch.randn(3, 4)
    before = model.weight.detach().clone()
    found = sampled(model, torch.optim.SGD(model.parameters(), lr=0.5), x)
    moved = (model.weight.detach() - before).norm() / before.norm()
    assert found["update_ratio"] == pytest.approx(float(moved), rel=1e-5)
    assert "adam_denominator" not in found


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_denominator_of_adam_is_measured_against_eps(eps: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4, bias=False), torch.randn(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=eps)
    found = sampled(model, optimizer, x)
    usual = optimizer.state[model.weight]["exp_avg_sq"].sqrt().median()
    assert found["adam_denominator"] == pytest.approx(float(eps / (usual + eps)), rel=1e-5)


def test_logits_are_measured_where_there_is_a_softmax_else_what_they_are_made_of() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4)
    for by_hand in (False, True):
        torch.manual_seed(1)
        model = Attending(by_hand=by_hand)
        with torch.no_grad():
            q, k = model.q(x), model.k(x)
            seen = (q @ k.transpose(-2, -1)).tril().amax()  # what the mask hides is not looked at
        found = sampled(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
        if by_hand:
            assert found["attention_logits"] == pytest.approx(float(seen), rel=1e-5)
        else:
            largest = max(float(each.abs().amax()) for each in (q, k))
            assert found["activation"] == pytest.approx(largest, rel=1e-5)


def test_forecast_says_what_else_has_grown() -> None:
    rows = [Row(signal="gradient", limit=HALF_MAX), Row(signal="adam_denominator")]
    outlook = Outlook(rows)
    for step in range(0, 200, 4):
        outlook.learn(step, np.arange(2), np.array([1.0, 1e-4]))
    outlook.learn(200, np.arange(2), np.array([1.0, 0.5]))
    assert list(outlook.beside()) == ["of Adam's denominators eps is 0.5; 0.0001 is usual"]


def test_samples_keep_to_their_share_of_the_time() -> None:
    rules = TrendRules(every=16, most_every=64, share=0.01)
    for taken, every in ((0.0001, 16), (0.0003, 32), (0.0006, 64), (9.0, 64)):
        pace = Pace(rules)
        pace.steps.extend([0.5, *[0.001] * 7])  # one that something else has held up
        pace.sampled(taken)
        assert pace.every == every


def test_forecast_whose_time_has_passed_is_made_anew_while_it_still_rises() -> None:
    noise = random.Random(2)
    flat = [1.0 + 0.05 * noise.random() for _ in range(128)]
    quick = [1.0 + 0.4 * n for n in range(24)]
    slow = [quick[-1] + 0.01 * n for n in range(400)]
    told = outlooks(flat + quick + slow, rules=TrendRules(every=16))
    assert len(told) > 1
    assert all(b.step > a.step + a.left for a, b in itertools.pairwise(told))


def test_what_is_kept_of_a_module_is_less_than_a_kilobyte() -> None:
    outlook = Outlook([Row(signal="activation", limit=HALF_MAX) for _ in range(1000)])
    for step in range(64):
        outlook.learn(step, np.arange(1000), np.ones(1000))
    kept = [value for value in vars(outlook).values() if isinstance(value, np.ndarray)]
    rows = 3  # its output, and the gradients of a weight and a bias
    assert rows * sum(array.nbytes for array in kept) / 1000 < 1024


def test_lowering_the_rate_before_keeps_training_finite() -> None:
    config = RecoveryConfig(on_forecast="lower_lr")
    _, guard = train(steps=260, config=config, forecast=True)
    done = [each.outcome for each in guard.forecasts if each.outcome is not None]
    assert done[0].strategy == "lower_lr"
    assert "updates are made with 0.25 of the learning rate, 0.075 instead of 0.3" in done[0].detail
    assert guard.incidents == []


def test_rate_is_lowered_from_an_old_snapshot_on_where_that_is_asked_for() -> None:
    for goes_back in (False, True):
        config = RecoveryConfig(on_forecast="lower_lr", lower_lr_goes_back=goes_back)
        _, guard = train(steps=260, config=config, forecast=True)
        first = next(each.outcome for each in guard.forecasts if each.outcome is not None)
        assert first.strategy == "lower_lr"
        assert ("back at the snapshot of step" in first.detail) == goes_back
        assert "of the learning rate, 0.075 instead of 0.3" in first.detail
        assert guard.incidents == []


@pytest.mark.parametrize("is_so", [False, True])
def test_preflight_lists_a_divergence_whatever_the_training_has(is_so: bool) -> None:
    found = possible_forecasts(in_half=is_so, is_scaled=is_so, has_adam=is_so, is_compiled=is_so)
    assert sum("probably diverge" in each for each in found) == 1


def test_recorded_run_tells_afterwards_what_could_have_been_known() -> None:
    class Samples(dict[int, Any]):
        asked = 0

        def get(self, *args: Any) -> Any:
            self.asked += 1
            return super().get(*args)

    losses = [1.0 + 0.01 * (step % 7) for step in range(1000)]
    losses += [1.05 * 2.0 ** (0.05 * n) for n in range(200)]
    rates = [0.1 * max(1.0, (step - 800) / 40) for step in range(1200)]
    steps = [(step, loss, loss**3, rates[step]) for step, loss in enumerate(losses)]
    healthy, samples = Samples(), Samples()
    assert foretold(steps[:1000], healthy) == []
    assert healthy.asked < 100
    first, *_ = [each for each in foretold(steps, samples) if not each.is_spike]
    assert (first.signal, first.where) == ("divergence", "")
    assert 1000 < first.step < 1040
    said = (first.message, *first.evidence)
    assert any("the learning rate is" in each for each in said)
    assert any("the norm of the gradients is" in each for each in said)


def test_command_shows_the_forecasts_of_a_run(tmp_path: Path) -> None:
    _, guard = train(forecast=True, run_dir=tmp_path / "run")
    shown = CliRunner().invoke(main, ["forecast", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    first = next(each for each in guard.forecasts if not each.is_spike)
    assert first.message in shown.output
    bad = guard.incidents[0].step
    assert (
        f"{bad - first.step} steps before the incident at step {bad}: {first.message}"
        in shown.output
    )
    as_json = CliRunner().invoke(main, ["forecast", "--json", str(tmp_path / "run")])
    assert len(json.loads(as_json.output)) == len(guard.forecasts)


def test_benchmark_runs_are_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed slice: one divergence each of three kinds is told before, a healthy run is quiet."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import forecast as benchmark

    kinds = ("growing_embedding", "value_function", "scale_collapse")
    scenes = list(benchmark.forecast_runs.scenes())
    chosen = [s for s in scenes if s.make.__name__ in kinds and s.seed == 0]
    for scene in chosen:
        trace = benchmark.record(scene, benchmark.MOST)
        lead, _ = benchmark.lead_of(trace, benchmark.forecasts(trace))
        assert (lead or 0) >= 3, trace.name
    (quiet,) = [s for s in scenes if s.name == "restarts-0-0"]
    assert benchmark.forecasts(benchmark.record(quiet, 400)) == []
    sys.modules.pop("forecast", None)


def test_a_score_tells_of_divergences_of_kinds_that_it_was_not_learned_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fixed slice of the tuning half, which benchmarks/forecast_fit.py leaves out."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import forecast as benchmark

    scenes = {scene.name: scene for scene in benchmark.scenes_of("tuning", [], of="blind")}
    for name in ("long_ratios-1-7057", "dead_reckoning-2-7077", "clicks-2-7101"):
        trace = benchmark.record(scenes[name], 150)
        lead, alarm = benchmark.lead_of(trace, benchmark.forecasts(trace))
        assert (alarm.what, lead >= 5) == ("divergence", True), name
    healthy = next(scene for scene in scenes.values() if scene.is_healthy)
    assert benchmark.forecasts(benchmark.record(healthy, 300)) == []
    sys.modules.pop("forecast", None)


def test_trees_ask_for_what_is_measured_and_end_in_a_leaf() -> None:
    trees = learned().trees
    assert set(trees.feature.tolist()) <= set(range(len(FEATURES)))
    for way in (trees.left, trees.right):
        at = trees.roots
        for _ in range(trees.depth):
            at = way[at]
        assert (trees.left[at] == at).all()
        assert (trees.right[at] == at).all()
    assert learned().low < learned().left < learned().high


def test_nothing_but_what_is_extreme_is_told_before_anybody_can_know() -> None:
    """A loss that climbs in the first steps of a training may be its beginning."""
    for slope, is_told in ((0.4, False), (2.0, True)):
        rise = [slope * max(0, n - 4) for n in range(15)]
        assert bool(both(rise, rise)) == is_told, slope


@pytest.mark.parametrize("slope", [0.3, 0.4, 0.6])
def test_what_climbs_in_the_first_steps_is_told_only_if_its_end_is_near(slope: float) -> None:
    noise = random.Random(4)
    rise = [slope * max(0, n - 6) + 0.05 * noise.random() for n in range(48)]
    assert [trend for trend in both(rise, rise) if trend.row is not None and trend.left > 96] == []


def test_fresh_benchmark_runs_end_where_they_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half holds each kind and severity; quick divergences diverge, a healthy run does not."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import forecast_fresh as fresh

    scenes = {scene.name: scene for scene in fresh.scenes()}
    ends = {name for name, scene in scenes.items() if not scene.is_healthy}
    assert ends == set(fresh.NONFINITE_AT)
    kinds = {(kind, severity) for kind in fresh.DIVERGING for severity in range(3)}
    for half in ("tuning", "held-out"):
        held = [scene for scene in scenes.values() if scene.half == half]
        assert kinds == {(each.kind, each.severity) for each in held if not each.is_healthy}
        assert sum(each.steps for each in held if each.is_healthy) >= 50_000
    for name in ("scaled_decoder-2-419", "spread_nodes-2-407", "ring_q-2-352"):
        _, end = fresh.losses_of(scenes[name])
        assert end == pytest.approx(fresh.NONFINITE_AT[name], abs=5), name
    losses, end = fresh.losses_of(dataclasses.replace(scenes["rated_films-0-488"], steps=300))
    assert end is None
    assert losses[-1] < losses[0]
