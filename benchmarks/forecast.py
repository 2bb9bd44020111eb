"""How long before the first non-finite value a forecast comes, and how often one is false.

    python benchmarks/forecast.py [--half tuning|held-out] [--traces FOLDER] [--only NAME ...]
        [--json]

60 trainings, most of which diverge by themselves, and 40 healthy ones (forecast_runs.py) are
recorded once, every signal in every step. Forecaster's own rules are then run over what was
recorded, with the samples that they would have asked for. Seeds that are even were there for
tuning; those that are odd are set aside. Beside it are rules of others, on the same losses,
gradient norms and loss scales.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forecast_runs import STEPS, Scene, scenes
from rich.console import Console
from rich.table import Table

from stayfinite.prevent.forecast.outlook import Outlook, Row, ScaleWatch, TrendRules, size_of_loss
from stayfinite.prevent.forecast.signals import SignalSampler

MOST = 250  # steps of a divergence
FIVE = 5
EARLY = 150  # an alarm longer before, whose interval does not hold the end, is passed over


@dataclass
class Trace:
    """One recorded run; `end` is the step of the first non-finite value, None if there is none."""

    name: str
    is_healthy: bool
    is_held_out: bool
    rows: list[Row]
    names: list[str]
    readings: list[tuple[np.ndarray, np.ndarray]]
    losses: list[float]
    scales: list[tuple[float, bool] | None]  # the loss scale, and whether the update was skipped
    end: int | None

    def norms(self) -> list[float]:
        """The norm of all gradients in each step; NaN where it is not known."""
        found = [n for n, row in enumerate(self.rows) if row.signal == "grad_norm"]
        return [
            float(values[rows == found[0]][0]) if found and (rows == found[0]).any() else math.nan
            for rows, values in self.readings
        ]


def record(scene: Scene, most: int) -> Trace:
    """Run it, and note every signal in every step until something is not finite.

    What a GradScaler skips is no end, but a scale below 1 is.
    """
    training = scene.training()
    sampler = SignalSampler(training.model)
    readings, losses, scales, end = [], [], [], None
    scaler = training.scaler
    for step in range(most):
        sampler.open(training.optimizer)
        scale = None if scaler is None else scaler.get_scale()
        losses.append(float(training.step(step)))
        after = None if scaler is None else scaler.get_scale()
        scales.append(None if scaler is None else (scale, after < scale))
        sampler.take(training.optimizer, step=step)
        (reading,) = sampler.ready()
        readings.append((reading.rows.astype(np.int32), reading.values.astype(np.float32)))
        checked = {"activation"} if scaler is not None else {"activation", "gradient"}
        seen = [sampler.rows[row].signal in checked for row in reading.rows]
        is_bad = not math.isfinite(losses[-1]) or not np.isfinite(reading.values[seen]).all()
        if is_bad or (after is not None and after < 1):
            end = step
            break
    sampler.close()
    known = {id(each): name for name, each in training.model.named_modules()}
    known |= {id(each): name for name, each in training.model.named_parameters()}
    names = [known.get(id(sampler.owner(n)), "") for n in range(len(sampler.rows))]
    return Trace(
        name=scene.name,
        is_healthy=scene.is_healthy,
        is_held_out=scene.is_held_out,
        rows=sampler.rows,
        names=names,
        readings=readings,
        losses=losses,
        scales=scales,
        end=end,
    )


def traces(folder: Path, chosen: list[Scene]) -> Iterator[Trace]:
    """Those that are recorded already, and the others as they are recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    for scene in chosen:
        path = folder / f"{scene.name}.pickle"
        if path.exists():
            yield Trace(**pickle.loads(path.read_bytes()))
            continue
        trace = record(scene, STEPS if scene.is_healthy else MOST)
        path.write_bytes(pickle.dumps(vars(trace)))
        print(f"recorded {trace.name}: {len(trace.losses)} steps, end {trace.end}", file=sys.stderr)
        yield trace


@dataclass(frozen=True)
class Alarm:
    """When a rule spoke up, and if it says so, between which steps it expects the end."""

    step: int
    low: float | None = None
    high: float | None = None
    left: float | None = None
    what: str = ""


Rule = Callable[[Trace], list[Alarm]]


def forecasts(trace: Trace, rules: TrendRules | None = None) -> list[Alarm]:
    """Ours, from the samples that it asks for; loss and loss scale are known in every step."""
    rows = [*trace.rows]
    loss_row = len(rows)
    rows.append(Row(signal="loss", limit=float(np.finfo("f4").max)))
    outlook, scale = Outlook(rows, rules or TrendRules()), ScaleWatch()
    alarms = []
    for step, (at, values) in enumerate(trace.readings):
        if step == trace.end:
            break
        loss = trace.losses[step]
        is_due = outlook.is_due(step)
        outlook.saw_loss(step, loss)
        noted = trace.scales[step]
        if noted is not None:
            told = scale.stepped(step, skipped=noted[1], scale=noted[0])
            if told is not None and told.steps_low is not None and told.steps_high is not None:
                between = step + told.steps_low, step + told.steps_high
                alarms.append(Alarm(step, *between, told.steps_left, "loss_scale"))
        if not is_due:
            continue
        size = size_of_loss(loss, outlook.losses)
        trend = outlook.learn(step, np.append(at, loss_row), np.append(values, size))
        if trend is not None:
            low, high = step + math.floor(trend.low), step + math.ceil(trend.high)
            where = "loss" if trend.row == loss_row else trace.names[trend.row]
            what = f"{rows[trend.row].signal} {where}"
            alarms.append(Alarm(step, low, high, trend.left, what))
    return sorted(alarms, key=lambda alarm: alarm.step)


def once(steps: Iterator[int], quiet: int = 64) -> list[Alarm]:
    """One alarm for an onset."""
    found: list[Alarm] = []
    last = -quiet - 1
    for step in steps:
        if step - last > quiet:
            found.append(Alarm(step))
        last = step
    return found


def six_sigma(trace: Trace) -> list[Alarm]:
    """OLMo's SkipStepOptimizer: loss or norm above mean + 6 deviations of the last 128."""

    def spikes() -> Iterator[int]:
        series = (trace.losses, trace.norms())
        for step in range(128, len(trace.losses)):
            for values in series:
                past = np.array(values[step - 128 : step])
                if values[step] > np.mean(past) + 6 * np.std(past):
                    yield step
                    break

    return once(spikes())


def zclip(trace: Trace) -> list[Alarm]:
    """ZClip: norm above moving average + 2.5 deviations (alpha 0.97, 25 steps of warm-up)."""

    def spikes() -> Iterator[int]:
        norms = trace.norms()
        mean, var = float(np.mean(norms[:25])), float(np.var(norms[:25]))
        for step in range(25, len(norms)):
            norm = norms[step]
            limit = mean + 2.5 * math.sqrt(var) if var >= 0 else math.nan
            if norm > limit:
                yield step
                norm = limit
            mean = 0.97 * mean + 0.03 * norm
            var = 0.97 * var + 0.03 * (norm - mean) ** 2

    return once(spikes())


def median_multiple(trace: Trace) -> list[Alarm]:
    """llm-foundry's KillLossSpike: most of the last losses above twice the running mean."""

    def spikes() -> Iterator[int]:
        window: deque[bool] = deque(maxlen=10)
        past: deque[float] = deque(maxlen=100)
        for step, loss in enumerate(trace.losses):
            if len(past) >= 50:
                window.append(loss > 2 * statistics.fmean(past))
                if sum(window) >= 5:
                    yield step
            past.append(loss)

    return once(spikes())


def norm_threshold(trace: Trace) -> list[Alarm]:
    """A norm above 100, which many scripts print a warning at."""
    return once(step for step, norm in enumerate(trace.norms()) if norm > 100)


def scaler_skips(trace: Trace) -> list[Alarm]:
    """GradScaler's own signs: three skipped updates within ten."""

    def spikes() -> Iterator[int]:
        skips: deque[int] = deque(maxlen=3)
        for step, noted in enumerate(trace.scales):
            if noted is not None and noted[1]:
                skips.append(step)
                if len(skips) == 3 and step - skips[0] < 10:
                    yield step

    return once(spikes())


RULES: dict[str, Rule] = {
    "stayfinite": forecasts,
    "6 sigma of 128 (OLMo)": six_sigma,
    "z-score of the norm (ZClip)": zclip,
    "multiples of the mean (llm-foundry)": median_multiple,
    "gradient norm above 100": norm_threshold,
    "GradScaler skips": scaler_skips,
}


def lead_of(trace: Trace, alarms: list[Alarm]) -> tuple[int | None, Alarm | None]:
    """Steps from the alarm that counts to the end: the first that is not too early to be true."""
    assert trace.end is not None
    for alarm in alarms:
        if alarm.step < trace.end and (trace.end - alarm.step <= EARLY or _holds(trace, alarm)):
            return trace.end - alarm.step, alarm
    return None, None


def _holds(trace: Trace, alarm: Alarm) -> bool:
    if alarm.low is None or alarm.high is None or trace.end is None:
        return False
    return alarm.low <= trace.end <= alarm.high


def score(rule: Rule, all_traces: list[Trace]) -> dict[str, Any]:
    """Figures of one rule over runs."""
    leads, inside, missed, late = [], [], [], []
    bad = [trace for trace in all_traces if not trace.is_healthy and trace.end is not None]
    for trace in bad:
        lead, alarm = lead_of(trace, rule(trace))
        if lead is None or alarm is None:
            missed.append(trace.name)
            continue
        leads.append(lead)
        if lead < FIVE:
            late.append(trace.name)
        if alarm.low is not None:
            inside.append(_holds(trace, alarm))
    healthy = [trace for trace in all_traces if trace.is_healthy]
    false = [(trace.name, alarm.step) for trace in healthy for alarm in rule(trace)]
    steps = sum(len(trace.losses) for trace in healthy)
    return {
        "divergences": len(bad),
        "before": len(leads) / max(1, len(bad)),
        "five_before": sum(lead >= FIVE for lead in leads) / max(1, len(bad)),
        "median_lead": statistics.median(leads + [0] * len(missed)) if bad else 0,
        "inside": statistics.fmean(inside) if inside else None,
        "healthy_steps": steps,
        "false_alarms": len(false),
        "per_50000": 50_000 * len(false) / max(1, steps),
        "missed": missed,
        "late": late,
        "false": false,
    }


def table(title: str, results: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title=title)
    for column in ("rule", "before", ">= 5 before", "median lead", "in interval", "false / 50,000"):
        shown.add_column(column, justify="left" if column == "rule" else "right")
    for name, r in results.items():
        inside = "-" if r["inside"] is None else f"{100 * r['inside']:.0f}%"
        cells = (f"{100 * r['before']:.0f}%", f"{100 * r['five_before']:.0f}%")
        false = f"{r['per_50000']:.1f}"
        shown.add_row(name, *cells, f"{r['median_lead']:.0f}", inside, false)
    return shown


def chosen_scenes(half: str | None, only: list[str]) -> list[Scene]:
    found = [scene for scene in scenes() if not only or scene.make.__name__ in only]
    return [each for each in found if half is None or each.is_held_out == (half == "held-out")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=["tuning", "held-out"])
    parser.add_argument("--traces", type=Path, default=Path("build/forecast"))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.process_time()
    found = list(traces(options.traces, chosen_scenes(options.half, options.only)))
    for trace in found:
        if not trace.is_healthy and trace.end is None:
            print(f"{trace.name} did not diverge", file=sys.stderr)
    halves = {"tuning": False, "held-out": True}
    results = {
        half: {
            name: score(rule, [trace for trace in found if trace.is_held_out == is_held_out])
            for name, rule in RULES.items()
        }
        for half, is_held_out in halves.items()
        if options.half in (None, half)
    }
    if options.json:
        json.dump(results, sys.stdout)
        return
    for half, scores in results.items():
        ours = scores["stayfinite"]
        count, steps = ours["divergences"], ours["healthy_steps"]
        Console().print(table(f"{half}: {count} divergences, {steps:,} healthy steps", scores))
        for key in ("missed", "late", "false"):
            if ours[key]:
                Console().print(f"{key}: {', '.join(map(str, ours[key]))}")
    print(f"{time.process_time() - began:.0f} s of processor time", file=sys.stderr)


if __name__ == "__main__":
    main()
