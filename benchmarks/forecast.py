"""How long before the first non-finite value a forecast comes, and how often one is false.

    python benchmarks/forecast.py [--set first|fresh|blind] [--half tuning|held-out]
        [--traces FOLDER] [--only NAME ...] [--every STEPS] [--saves] [--cost] [--pictures FOLDER]
        [--json]

Trainings that diverge by themselves, and healthy ones, are recorded once, every signal in every
step. Forecaster's own rules are then run over what was recorded, with the samples that they would
have asked for. The rules were tuned on forecast_runs.py, forecast_unseen.py and forecast_fresh.py,
from which the trees were grown too (forecast_fit.py). forecast_blind.py (`--set blind`) was written
by somebody who did not know them: one half of it was looked at, the other was run once, when tuning
had ended. Beside it are rules of others, on the same losses, gradient norms and loss scales.
`--saves` runs the divergences once more with `on_forecast="lower_lr"`, with and without going back,
`--cost` times a step with and without, `--pictures` draws some runs.
"""

from __future__ import annotations

import argparse
import importlib
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

import forecast_runs
import numpy as np
import torch
from forecast_runs import STEPS
from rich.console import Console
from rich.table import Table
from workloads import workload

import stayfinite
from stayfinite.prevent.forecast.divergence import Divergence
from stayfinite.prevent.forecast.forecaster import Forecaster
from stayfinite.prevent.forecast.outlook import Outlook, Row, ScaleWatch, TrendRules, size_of_loss
from stayfinite.prevent.forecast.signals import ModuleOutputs, SignalSampler

MOST = 250  # steps of a divergence
AFTER = 100  # steps after the end of a divergence that a saved one must stay finite for
BARS = {"gpt": 0.5, "cnn": 0.5, "mlp": 3.0}  # percent of a step
FIVE = 5
EARLY = 150  # an alarm longer before, whose interval does not hold the end, is passed over


@dataclass
class Trace:
    """One recorded run; `end` is the step of the first non-finite value, None if there is none."""

    name: str
    is_healthy: bool
    rows: list[Row]
    names: list[str]
    readings: list[tuple[np.ndarray, np.ndarray]]
    losses: list[float]
    scales: list[tuple[float, bool] | None]  # the loss scale, and whether the update was skipped
    end: int | None
    rates: list[float]

    def norms(self) -> list[float]:
        """The norm of all gradients in each step; NaN where it is not known."""
        found = [n for n, row in enumerate(self.rows) if row.signal == "grad_norm"]
        return [
            float(values[rows == found[0]][0]) if found and (rows == found[0]).any() else math.nan
            for rows, values in self.readings
        ]


def record(scene: Any, most: int) -> Trace:
    """Run it, and note every signal in every step until something is not finite.

    What a GradScaler skips is no end, but a scale below 1 is.
    """
    training = scene.training()
    sampler = SignalSampler(ModuleOutputs(training.model))
    readings, losses, scales, rates, end = [], [], [], list[float](), None
    scaler = training.scaler
    for step in range(most):
        sampler.open(training.optimizer)
        scale = None if scaler is None else scaler.get_scale()
        rates.append(float(training.optimizer.param_groups[0]["lr"]))
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
        rows=sampler.rows,
        names=names,
        readings=readings,
        losses=losses,
        scales=scales,
        end=end,
        rates=rates,
    )


def steps_of(scene: Any) -> int:
    """How long it runs unless it ends by itself."""
    if hasattr(scene, "steps"):
        return int(scene.steps)
    if scene.make.__module__ != forecast_runs.__name__:
        return int(sys.modules[scene.make.__module__].STEPS)
    return STEPS if scene.is_healthy else MOST


def traces(folder: Path, chosen: list[Any]) -> Iterator[Trace]:
    """Those that are recorded already, and the others as they are recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    for scene in chosen:
        path = folder / f"{scene.name}.pickle"
        if path.exists():
            yield Trace(**pickle.loads(path.read_bytes()))
            continue
        trace = record(scene, steps_of(scene))
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


def forecasts(
    trace: Trace,
    rules: TrendRules | None = None,
    noted: Divergence | None = None,
    sampled: list[int] | None = None,
) -> list[Alarm]:
    """Ours, from the samples that it asks for; loss and loss scale are known in every step.

    With `noted`, nothing is told by a score: it is to be learned from what is noted. `sampled`
    gets the steps that were asked for.
    """
    rows = [*trace.rows]
    loss_row = len(rows)
    rows.append(Row(signal="loss", limit=float(np.finfo("f4").max)))
    outlook, scale = Outlook(rows, rules or TrendRules()), ScaleWatch()
    if noted is not None:
        outlook.divergence, outlook.learned = noted, None
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
        if sampled is not None:
            sampled.append(step)
        size = size_of_loss(loss, outlook.losses)
        trend = outlook.learn(
            step, np.append(at, loss_row), np.append(values, size), rate=trace.rates[step]
        )
        if trend is not None:
            low, high = step + math.floor(trend.low), step + math.ceil(trend.high)
            what = "divergence"
            if trend.row is not None:
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


def scenes_of(half: str, only: list[str], *, of: str = "first") -> list[Any]:
    """The runs of one half of a set; each has a name, is_healthy, and training()."""
    if of != "first":
        scenes = importlib.import_module(f"forecast_{of}").scenes()
        found: list[Any] = [scene for scene in scenes if scene.half == half]
    elif half == "tuning":
        found = list(forecast_runs.scenes())
    else:
        import forecast_unseen

        found = list(forecast_unseen.scenes())
    return [scene for scene in found if not only or scene.name.split("-")[0] in only]


def saved(scene: Any, end: int, *, goes_back: bool) -> dict[str, Any]:
    """The same run with `on_forecast="lower_lr"`: whether it stays finite for longer, and learns.

    It learns if its last losses are below that of the first step.
    """
    training = scene.training()
    scaler, losses = training.scaler, list[float]()
    config = stayfinite.RecoveryConfig(on_forecast="lower_lr", lower_lr_goes_back=goes_back)
    with stayfinite.watch(
        training.model,
        training.optimizer,
        scheduler=training.scheduler,
        scaler=scaler,
        config=config,
        sinks=[],
        again="never",
        forecast=True,
    ) as guard:
        for step in range(end + AFTER):
            try:
                losses.append(float(training.step(step)))
            except stayfinite.TrainingAbortedError:
                break
            is_out = scaler is not None and scaler.get_scale() < 1
            if guard.incidents or not math.isfinite(losses[-1]) or is_out:
                break
        told = [each for each in guard.forecasts if not each.is_spike]
    is_finite = len(losses) == end + AFTER and not guard.incidents
    first, last = losses[0], statistics.median(losses[-20:])
    return {
        "name": scene.name,
        "is_seen": bool(told),
        "is_finite": is_finite,
        "learns": is_finite and last < first,
        "steps": len(losses),
    }


def savings(all_scenes: list[Any], found: list[Trace], *, goes_back: bool) -> dict[str, Any]:
    """Of the divergences that a forecast was made of: how many were saved."""
    ends = {trace.name: trace.end for trace in found if not trace.is_healthy}
    runs = [
        saved(each, end, goes_back=goes_back)
        for each in all_scenes
        if (end := ends.get(each.name)) is not None
    ]
    seen = [run for run in runs if run["is_seen"]]
    good = [run for run in seen if run["learns"]]
    return {
        "seen": len(seen),
        "saved": len(good) / max(1, len(seen)),
        "not_saved": [run for run in seen if not run["learns"]],
        "not_seen": [run["name"] for run in runs if not run["is_seen"]],
    }


def share_sampled(healthy: list[Trace], every: int) -> float:
    """What part of the steps of healthy runs is sampled, the first ones among them."""
    sampled: list[int] = []
    for trace in healthy:
        forecasts(trace, TrendRules(every=every), sampled=sampled)
    return len(sampled) / sum(len(trace.losses) for trace in healthy)


def cost(name: str, rounds: int, healthy: list[Trace]) -> dict[str, float]:
    """What forecasting adds to a step: low quantiles of steps without it, quiet and sampled ones.

    They take turns, since the machine may have other things to do; of all that is timed the
    shortest tenth tells. How many steps are sampled is counted in healthy runs.
    """
    work = workload(name)
    forecaster = Forecaster(work.model)
    for _ in range(20):
        work.step()
        forecaster.stepped(work.optimizer, loss=1.0)
    (watched,) = forecaster._watched.values()
    times: dict[str, list[float]] = {"bare": [], "quiet": [], "sampled": [], "call": []}
    for turn in range(rounds):
        for kind in ("bare", "quiet", "bare", "sampled"):
            watched.sampler.close()
            watched._step = 64 * (turn + 10) + (0 if kind == "sampled" else 1)
            if kind == "sampled":
                watched.sampler.open(work.optimizer)
            began = time.perf_counter()
            work.step()
            called = time.perf_counter()
            if kind != "bare":
                forecaster.stepped(work.optimizer, loss=1.0 + 0.01 * (turn % 7))
            ended = time.perf_counter()
            times[kind].append(ended - began)
            if kind == "quiet":
                times["call"].append(ended - called)
    forecaster.close()
    low = {kind: sorted(taken)[len(taken) // 10] for kind, taken in times.items()}
    share = share_sampled(healthy, watched.outlook.pace.every)
    added = low["call"] + share * max(0.0, low["sampled"] - low["bare"])
    return {
        "step_us": 1e6 * low["bare"],
        "quiet_us": 1e6 * low["call"],
        "sampled_us": 1e6 * (low["sampled"] - low["bare"]),
        "every": watched.outlook.pace.every,
        "share": share,
        "percent": 100 * added / low["bare"],
        "bar_percent": BARS[name],
    }


def cost_table(costs: dict[str, dict[str, float]]) -> Table:
    shown = Table(title="added to a step, amortised")
    for column in ("", "step, us", "quiet, us", "sampled, us", "every", "of all", "added", "bar"):
        shown.add_column(column, justify="left" if not column else "right")
    for name, each in costs.items():
        cells = [f"{each[key]:,.1f}" for key in ("step_us", "quiet_us", "sampled_us")]
        cells += [f"{each['every']:.0f}", f"{each['share']:.1%}", f"{each['percent']:.2f}%"]
        shown.add_row(name, *cells, f"{each['bar_percent']}%")
    return shown


# Pictures of runs: the size of what is going to overflow, the forecast, and what came.

LEFT, TOP, WIDTH, HEIGHT = 56, 34, 560, 190
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
 aria-label="{title}" font-family="sans-serif" font-size="12">
<style>
text {{ fill: #333 }} .line {{ stroke: #ccc }} .size {{ stroke: #456; fill: none }}
.band {{ fill: #0a7d52; opacity: 0.18 }} .told {{ stroke: #0a7d52 }} .end {{ stroke: #c22 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #ddd }} .line {{ stroke: #555 }} .size {{ stroke: #abc }} .band {{ fill: #3ecf95 }}
.told {{ stroke: #3ecf95 }} .end {{ stroke: #f66 }} }}
</style>
"""


def picture(trace: Trace, title: str) -> str | None:
    """One run as SVG: the row that was told, or the loss, when and what; None if nothing was."""
    lead, alarm = lead_of(trace, forecasts(trace)) if trace.end is not None else (None, None)
    if lead is None or alarm is None or alarm.low is None or alarm.high is None:
        return None
    assert trace.end is not None
    kind, _, where = alarm.what.partition(" ")
    numbers = [
        number
        for number, (row, name) in enumerate(zip(trace.rows, trace.names, strict=True))
        if row.signal == kind and name == where
    ]
    limit, sizes = math.log2(float(np.finfo("f4").max)), [abs(loss) for loss in trace.losses]
    if numbers:
        limit = math.log2(trace.rows[numbers[0]].limit)
        sizes = [
            float(values[rows == numbers[0]][0]) if (rows == numbers[0]).any() else math.nan
            for rows, values in trace.readings
        ]
    points = [(n, math.log2(x)) for n, x in enumerate(sizes) if 0 < x < math.inf]
    low, high = min(y for _, y in points), limit
    last = max(trace.end + 10, min(alarm.high, trace.end + 60))

    def x(step: float) -> float:
        return LEFT + WIDTH * min(step, last) / last

    def y(size: float) -> float:
        return TOP + HEIGHT * (high - size) / (high - low)

    line = " ".join(f"{x(n):.1f},{y(size):.1f}" for n, size in points)
    bottom = TOP + HEIGHT
    said = f"told at step {alarm.step}: about {alarm.step + (alarm.left or 0):.0f}"
    parts = [
        HEAD.format(width=LEFT + WIDTH + 24, height=bottom + 44, title=title),
        f'<text x="{LEFT}" y="16">{title}</text>\n',
        f'<rect class="band" x="{x(alarm.low):.1f}" y="{TOP}" '
        f'width="{x(alarm.high) - x(alarm.low):.1f}" height="{HEIGHT}"/>\n',
        f'<line class="line" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{TOP}" y2="{TOP}"/>\n',
        f'<line class="line" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{bottom}" y2="{bottom}"/>\n',
        f'<polyline class="size" stroke-width="1.5" points="{line}"/>\n',
        f'<line class="told" stroke-width="2" x1="{x(alarm.step):.1f}" x2="{x(alarm.step):.1f}" '
        f'y1="{TOP}" y2="{bottom}"/>\n',
        f'<line class="end" stroke-width="2" x1="{x(trace.end):.1f}" x2="{x(trace.end):.1f}" '
        f'y1="{TOP}" y2="{bottom}"/>\n',
        f'<text x="{LEFT - 6}" y="{TOP + 4}" text-anchor="end">2^{high:.0f}</text>\n',
        f'<text x="{LEFT - 6}" y="{bottom + 4}" text-anchor="end">2^{low:.0f}</text>\n',
        f'<text x="{LEFT}" y="{bottom + 18}">0</text>\n',
        f'<text x="{LEFT + WIDTH}" y="{bottom + 18}" text-anchor="end">step {last:.0f}</text>\n',
        f'<text x="{LEFT}" y="{bottom + 36}">{said} ({alarm.low:.0f}-{alarm.high:.0f}); '
        f"not finite at step {trace.end}, {lead} steps later</text>\n",
        "</svg>\n",
    ]
    return "".join(parts)


PICTURES = {
    "half_creep-2-5": "A residual stream in float16: the output of one module",
    "value_function-0-0": "A value function that learns from itself: its loss",
    "growing_embedding-2-4": "An embedding that grows in float16: the output of the model",
}


def draw(found: list[Trace], folder: Path) -> None:
    for trace in found:
        if trace.name in PICTURES and (drawn := picture(trace, PICTURES[trace.name])):
            (folder / f"forecast-{trace.name.split('-')[0]}.svg").write_text(drawn)


def tell(half: str, scores: dict[str, dict[str, Any]]) -> None:
    """The table of one half, and what of ours went wrong by name."""
    ours = scores["stayfinite"]
    count, steps = ours["divergences"], ours["healthy_steps"]
    Console().print(table(f"{half}: {count} divergences, {steps:,} healthy steps", scores))
    for key in ("missed", "late", "false"):
        if ours[key]:
            Console().print(f"{key}: {', '.join(map(str, ours[key]))}")


def tell_savings(how: str, result: dict[str, Any]) -> None:
    print(f"{how}: saved {result['saved']:.0%} of {result['seen']} seen")
    for run in result["not_saved"]:
        why = "finite, but learns nothing" if run["is_finite"] else f"until step {run['steps']}"
        print(f"  not saved: {run['name']}, {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=["first", "fresh", "blind"], default="first")
    parser.add_argument("--half", choices=["tuning", "held-out"])
    parser.add_argument("--traces", type=Path, default=Path("build/forecast"))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--every", type=int, default=TrendRules.every, help="steps between samples")
    parser.add_argument("--saves", action="store_true", help="run divergences with lower_lr")
    parser.add_argument("--cost", action="store_true", help="time steps, and nothing else")
    parser.add_argument("--pictures", type=Path, help="draw some runs into this folder")
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.process_time()
    if options.cost:
        runs = traces(options.traces, scenes_of("tuning", [], of="blind"))
        healthy = [trace for trace in runs if trace.is_healthy]
        rounds = {"mlp": 600, "cnn": 40, "gpt": 15}
        costs = {name: cost(name, rounds[name], healthy) for name in BARS}
        print(json.dumps(costs)) if options.json else Console().print(cost_table(costs))
        return
    rules: dict[str, Rule] = {**RULES}
    if options.every != TrendRules.every:
        rules["stayfinite"] = lambda trace: forecasts(trace, TrendRules(every=options.every))
    results: dict[str, Any] = {}
    for half in ("tuning", "held-out"):
        if options.half not in (None, half):
            continue
        chosen = scenes_of(half, options.only, of=options.set)
        found = list(traces(options.traces, chosen))
        if options.pictures is not None:
            draw(found, options.pictures)
        for trace in found:
            if not trace.is_healthy and trace.end is None:
                print(f"{trace.name} did not diverge", file=sys.stderr)
        scores = {name: score(rule, found) for name, rule in rules.items()}
        results[half] = {"rules": scores}
        if options.saves:
            results[half]["saves"] = {
                'on_forecast="lower_lr"': savings(chosen, found, goes_back=True),
                "and lower_lr_goes_back=False": savings(chosen, found, goes_back=False),
            }
        if not options.json:
            tell(half, scores)
            if options.saves:
                for how, result in results[half]["saves"].items():
                    tell_savings(f"{half}, {how}", result)
    if options.json:
        json.dump(results, sys.stdout)
    print(f"{time.process_time() - began:.0f} s of processor time", file=sys.stderr)


if __name__ == "__main__":
    main()
