"""All the checks of a load in one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from stayfinite.checkpoint.checks.fitting import Fit, as_named_by, fit
from stayfinite.checkpoint.checks.forward import forward_problems
from stayfinite.checkpoint.checks.optimizers import optimizer_problems
from stayfinite.checkpoint.checks.sanity import own_problems
from stayfinite.checkpoint.format.contents import Contents, ModuleRecord, part_name
from stayfinite.checkpoint.format.held import Held
from stayfinite.checkpoint.members import Members, parameter_names
from stayfinite.checkpoint.problems import Problem, Rules, errors_in


@dataclass(kw_only=True)
class Judged:
    """Where everything goes, and all that is wrong."""

    problems: list[Problem] = field(default_factory=list)
    fits: list[tuple[nn.Module, Fit]] = field(default_factory=list)
    other_averages: list[tuple[Any, Any]] = field(default_factory=list)


def judge(
    contents: Contents,
    members: Members,
    rules: Rules,
    *,
    forward: Any = None,
) -> Judged:
    """Check the contents in themselves, and against everyone who shall get them."""
    known = replace(contents, models=_named(contents.models, members.models, rules.ignore))
    judged = Judged(problems=list(own_problems(known, nonfinite_ok=rules.nonfinite_ok)))
    judged.problems += _absent(contents, members)
    _fit_models(judged, contents, members, rules)
    _fit_averages(judged, contents, members, rules)
    for number, (record, optimizer) in enumerate(
        zip(contents.optimizers, members.optimizers, strict=False)
    ):
        part = part_name("optimizer", number, len(members.optimizers))
        names = parameter_names(optimizer, members.models)
        judged.problems += optimizer_problems(record, optimizer, names, part)
    if forward is not None and members.models and not errors_in(judged.problems):
        model, found = judged.fits[0]
        judged.problems += forward_problems(model, found, forward)
    return judged


def _named(
    records: tuple[ModuleRecord, ...], models: tuple[nn.Module, ...], ignore: Sequence[str]
) -> tuple[ModuleRecord, ...]:
    if len(records) != len(models):
        return records
    pairs = zip(models, records, strict=True)
    return tuple(as_named_by(model, record, ignore) for model, record in pairs)


def _absent(contents: Contents, members: Members) -> Iterator[Problem]:
    """Parts that are asked for and not there."""
    pairs = (
        ("model", len(contents.models), len(members.models)),
        ("optimizer", len(contents.optimizers), len(members.optimizers)),
        ("scheduler", len(contents.schedulers), len(members.schedulers)),
        ("scaler", int(contents.scaler is not None), int(members.scaler is not None)),
        ("ema", len(contents.averages), len(members.averages)),
    )
    for part, there, asked in pairs:
        if asked and there != asked:
            message = f"the file has {there or 'none'}, and {asked} shall be loaded."
            yield Problem(kind="missing", key=part, message=message)


def _fit_models(judged: Judged, contents: Contents, members: Members, rules: Rules) -> None:
    for number, (record, model) in enumerate(zip(contents.models, members.models, strict=False)):
        part = part_name("model", number, len(members.models))
        found = fit(record, model, part, rules)
        judged.problems += found.problems
        judged.fits.append((model, found))


def _fit_averages(judged: Judged, contents: Contents, members: Members, rules: Rules) -> None:
    for number, (state, average) in enumerate(
        zip(contents.averages, members.averages, strict=False)
    ):
        part = part_name("ema", number, len(members.averages))
        if not isinstance(average, nn.Module):
            judged.other_averages.append((average, state))
            continue
        record = _record_of(state)
        if record is None:
            message = "is no state of a module, and shall be loaded into one."
            judged.problems.append(Problem(kind="missing", key=part, message=message))
            continue
        found = fit(record, average, part, rules)
        judged.problems += found.problems
        judged.fits.append((average, found))


def _record_of(state: Any) -> ModuleRecord | None:
    if isinstance(state, ModuleRecord):
        return state
    if isinstance(state, dict) and all(isinstance(item, Held) for item in state.values()):
        return ModuleRecord(tensors=state)
    return None
