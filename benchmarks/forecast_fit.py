"""Learn from trainings what a divergence looks like: writes prevent/forecast/divergence.json.

    python benchmarks/forecast_fit.py [--traces FOLDER] [--jobs N] [--check]

All runs of forecast_runs.py, forecast_unseen.py and forecast_fresh.py count; forecast_blind.py is
left for forecast.py. Each of them is run with other rates as well: a healthy one with 3, 9 and 27
times its rate until it diverges, every second divergence with a half and a fifth of it. What stays
finite and learns is an example of health, but for a divergence that is only slower; what has not
learned is none at all.

What is measured in the last 150 steps before an end, with the samples that Forecaster would ask
for, is to be told from what is measured in healthy runs, by boosted trees. Each run counts twice:
once with samples that are as far apart as those of the smallest models. How high a score must be
is found by cross-validation, in which no kind of training is in both parts: such that in the
healthy runs as they were written there are no more alarms than are allowed. `--check` prints what
was found, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import warnings
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forecast
import forecast_fresh
import forecast_runs
import forecast_unseen
import numpy as np
import torch
from forecast import EARLY, FIVE, Trace, forecasts
from forecast_runs import Training
from sklearn.ensemble import HistGradientBoostingClassifier

from stayfinite.prevent.forecast import divergence
from stayfinite.prevent.forecast.divergence import FEATURES, UNKNOWN, Divergence
from stayfinite.prevent.forecast.outlook import TrendRules

MOST = 1200  # steps of a run with another rate
FOLDS = 8
ALLOWED = 1 / 50_000  # alarms in a healthy step
MARGIN = 0.4  # of the score, since other trainings differ from all of these
BETWEEN = (0.05, 0.5, 0.75)  # of the ends come before `low`, `left` and `high`
FAR_APART = TrendRules(every=TrendRules.most_every)
LESS = (("top", "room"), ("top", "room", "update", "rate"))  # that may not be measured
SHAPE = {
    "learning_rate": 0.06,
    "max_iter": 250,
    "max_leaf_nodes": 8,
    "min_samples_leaf": 40,
    "l2_regularization": 5.0,
    "max_features": 0.4,
    "early_stopping": False,
}


@dataclass(frozen=True)
class Scaled:
    """A scene whose rate is another one."""

    scene: Any
    factor: float

    @property
    def name(self) -> str:
        return f"{self.scene.name}@{self.factor:g}"

    @property
    def is_healthy(self) -> bool:
        """Whether it is if it stays finite; a divergence with a lower rate is only slower."""
        return self.factor > 1

    @property
    def steps(self) -> int:
        return min(forecast.steps_of(self.scene), MOST)

    def training(self) -> Training:
        training = self.scene.training()
        for group in training.optimizer.param_groups:
            group["lr"] *= self.factor
        if hasattr(training.scheduler, "base_lrs"):
            training.scheduler.base_lrs = [
                rate * self.factor for rate in training.scheduler.base_lrs
            ]
        return training


@dataclass(frozen=True)
class Example:
    """One run: what the trees would have looked at in each sample, and the steps left then."""

    name: str
    is_usual: bool  # its samples are as far apart as they are in most trainings
    kind: str
    is_healthy: bool
    steps: int
    end: int | None
    at: np.ndarray
    features: np.ndarray
    others: list[tuple[int, float, float]]  # what is told without a score: when, and its interval


class Recording(Divergence):
    """Keeps what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[int, np.ndarray]] = []

    def features(self, losses: Collection[float]) -> np.ndarray | None:
        found = super().features(losses)
        if found is not None:
            self.said.append((self._steps[-1], found))
        return found


def kind_of(name: str) -> str:
    """Runs of one kind differ in severity, seed or rate."""
    return re.sub(r"-\d+", "", name.partition("@")[0])


def example(trace: Trace, rules: TrendRules) -> Example:
    noted = Recording()
    alarms = forecasts(trace, rules, noted)
    is_sound = trace.end is None and ("@" not in trace.name or has_learned(trace.losses))
    return Example(
        name=trace.name,
        is_usual=rules == TrendRules(),
        kind=kind_of(trace.name),
        is_healthy=trace.is_healthy and is_sound,
        steps=len(trace.losses),
        end=trace.end,
        at=np.array([step for step, _ in noted.said], dtype=int),
        features=np.array([each for _, each in noted.said]).reshape(-1, len(FEATURES)),
        others=[(alarm.step, alarm.low or 0.0, alarm.high or 0.0) for alarm in alarms],
    )


def has_learned(losses: Sequence[float]) -> bool:
    """Whether a training that has stayed finite has learned, and is where it was best, or near."""
    pieces = [statistics.median(losses[at : at + 50]) for at in range(0, len(losses) - 49, 50)]
    least, span = min(pieces), max(pieces[0] - min(pieces), 1e-12)
    return pieces[-1] - least < 0.5 * span and least < pieces[0]


def families() -> Iterator[list[Any]]:
    """Scenes of which each is run only if the one before has stayed finite."""
    for module in (forecast_runs, forecast_unseen, forecast_fresh):
        number = 0
        for scene in module.scenes():
            yield [scene]
            number += not scene.is_healthy
            if scene.is_healthy:
                yield [Scaled(scene, factor) for factor in (3, 9, 27)]
            elif number % 2:
                yield [Scaled(scene, 0.5)]
                yield [Scaled(scene, 0.2)]


def examples_of(family: list[Any], folder: Path) -> list[Example]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = []
    for trace in forecast.traces(folder, family):
        found += [example(trace, rules) for rules in (TrendRules(), FAR_APART)]
        if trace.end is not None:
            break
    return found


def without(features: np.ndarray, signals: Sequence[str]) -> np.ndarray:
    """The same where these are not measured."""
    found = features.copy()
    found[:, [name.startswith(tuple(signals)) for name in FEATURES]] = UNKNOWN
    return found


def grown(examples: list[Example]) -> HistGradientBoostingClassifier:
    """Trees that tell the last steps before an end from healthy ones; each divergence counts alike.

    Every fourth example counts once more without what is not measured in compiled models, every
    fourth without what is not in a recorded run.
    """
    features, is_near, weights = [], [], []
    for number, each in enumerate(examples):
        shown, weight = each.features, 1.0
        if each.end is not None:
            shown = shown[(each.end - each.at <= EARLY) & (each.end - each.at >= 2)]
            weight = 30.0 / max(10, len(shown))
        elif not each.is_healthy:
            continue
        ways = [shown]
        which = number // 2 % 4  # both examples of a run alike
        if which < len(LESS):
            ways.append(without(shown, LESS[which]))
        for way in ways:
            features.append(way)
            is_near.append(np.full(len(way), each.end is not None))
            weights.append(np.full(len(way), weight))
    model = HistGradientBoostingClassifier(random_state=0, **SHAPE)
    return model.fit(np.vstack(features), np.concatenate(is_near), np.concatenate(weights))


def scores_without_own_kind(examples: list[Example]) -> list[np.ndarray]:
    """Of each run the scores by trees that have not seen its kind."""
    kinds = sorted({each.kind for each in examples})
    np.random.default_rng(0).shuffle(kinds)
    found = [np.zeros(0)] * len(examples)
    for fold in range(FOLDS):
        left_out = set(kinds[fold::FOLDS])
        model = grown([each for each in examples if each.kind not in left_out])
        for number, each in enumerate(examples):
            if each.kind in left_out and len(each.at):
                found[number] = model.decision_function(each.features)
    return found


def alarms_of(at: np.ndarray, scores: np.ndarray, least: float, quiet: int = 150) -> list[int]:
    """Steps in which a score is told: again when it is still high after a while."""
    found: list[int] = []
    for step in at[scores > least].tolist():
        if not found or step > found[-1] + quiet:
            found.append(step)
    return found


def least_score(examples: list[Example], scores: list[np.ndarray], allowed: float) -> float:
    """The least from which on there are no more false alarms than are allowed."""
    healthy = [
        (each, of_it)
        for each, of_it in zip(examples, scores, strict=True)
        if each.is_healthy and each.end is None
    ]
    most = allowed * sum(each.steps for each, _ in healthy)
    least = 0.0
    for least in np.sort(np.concatenate([of_it for _, of_it in healthy]))[::-1][:4000].tolist():
        if sum(len(alarms_of(each.at, of_it, least)) for each, of_it in healthy) > most:
            break
    return least


def leads(examples: list[Example], scores: list[np.ndarray], least: float) -> dict[str, int]:
    """Of each divergence, the steps from the first alarm that counts, of any kind, to its end."""
    found = {}
    for each, of_it in zip(examples, scores, strict=True):
        if each.end is None:
            continue
        told = [
            each.end - step
            for step, low, high in each.others
            if step < each.end and (each.end - step <= EARLY or low <= each.end <= high)
        ]
        told += [
            each.end - step for step in alarms_of(each.at, of_it, least) if each.end - step <= EARLY
        ]
        found[each.name] = max(told, default=0)
    return found


def written(model: HistGradientBoostingClassifier) -> dict[str, Any]:
    """The trees as lists; sklearn has no public way to its nodes."""
    roots, nodes, depth = [], [], 0
    nodes.append([0, 0.0, 0, 0, float(model._baseline_prediction.item())])
    roots.append(0)
    for (tree,) in model._predictors:
        first = len(nodes)
        roots.append(first)
        for number, node in enumerate(tree.nodes):
            here = first + number
            if node["is_leaf"]:
                nodes.append([0, 0.0, here, here, round(float(node["value"]), 4)])
            else:
                branches = [first + int(node["left"]), first + int(node["right"])]
                threshold = round(float(node["num_threshold"]), 4)
                nodes.append([int(node["feature_idx"]), threshold, *branches, 0.0])
        depth = max(depth, int(tree.nodes["depth"].max()))
    return {"depth": depth, "roots": roots, "nodes": nodes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=Path("build/forecast"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    all_families = list(families())
    with ProcessPoolExecutor(options.jobs) as pool:
        parts = pool.map(examples_of, all_families, [options.traces] * len(all_families))
        examples = [each for part in parts for each in part if len(each.at)]
    scores = scores_without_own_kind(examples)
    own = [number for number, each in enumerate(examples) if each.is_usual and "@" not in each.name]
    chosen, theirs = [examples[n] for n in own], [scores[n] for n in own]
    least = least_score(chosen, theirs, ALLOWED) + MARGIN
    healthy = [each for each in chosen if each.is_healthy and each.end is None]
    found = leads(chosen, theirs, least)
    count, values = len(found), list(found.values())
    told = {
        each.name: len(alarms)
        for each, of_it in zip(chosen, theirs, strict=True)
        if each in healthy and (alarms := alarms_of(each.at, of_it, least))
    }
    print(
        f"{count} divergences, told before {sum(v > 0 for v in values) / count:.1%}, "
        f"{FIVE} steps before {sum(v >= FIVE for v in values) / count:.1%}, "
        f"median {statistics.median(values)}; {sum(told.values())} false alarms in "
        f"{sum(each.steps for each in healthy):,} healthy steps: {told}"
    )
    print("late:", {name: lead for name, lead in found.items() if lead < FIVE})
    ends = [
        each.end - step
        for each, of_it in zip(chosen, theirs, strict=True)
        if each.end is not None
        for step in alarms_of(each.at, of_it, least)
    ]
    low, left, high = np.quantile(ends, BETWEEN)
    figures = {"least": least, "low": low, "left": left, "high": high}
    figures = {key: round(float(value), 2) for key, value in figures.items()}
    print(figures, f"{len(ends)} alarms")
    if not options.check:
        path = Path(divergence.__file__).with_suffix(".json")
        text = json.dumps({**figures, **written(grown(examples))}, separators=(",", ":"))
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
