"""From bad tensors to an Incident: what, where and why, put together."""

from __future__ import annotations

import dataclasses
import gc
import time

from torch import Tensor
from torch.optim import Optimizer

from stayfinite.detect.gradients import params_of
from stayfinite.detect.leaves import leaves_of
from stayfinite.detect.reports import bad_reports
from stayfinite.detect.walk import Named
from stayfinite.distributed import rank, world_size
from stayfinite.evidence import Evidence
from stayfinite.locate.arming import Tracing
from stayfinite.locate.graph import origin_from_graph
from stayfinite.locate.names import Names, one_look
from stayfinite.records import Incident, Origin, Outcome, Phase
from stayfinite.report.wording import on_rank
from stayfinite.settings import GuardSettings

_DESCRIBED = 8


@dataclasses.dataclass(frozen=True)
class Finding:
    """Named tensors of which some are bad, and what was done about it."""

    named: list[Named]
    optimizer: Optimizer | None = None
    _: dataclasses.KW_ONLY
    did: str = "nothing was changed"
    is_after_update: bool = False


def gradients_found(pairs: list[tuple[Tensor, Tensor]], optimizer: Optimizer | None) -> Finding:
    """Gradients, each with its parameter, of which some are bad."""
    names = Names()
    named = [
        (f"gradients.{names.tensor(param) or number}", gradient)
        for number, (param, gradient) in enumerate(pairs)
    ]
    return Finding(named, optimizer, did="the update was vetoed")


def parameters_found(optimizer: Optimizer) -> Finding:
    """An optimizer's parameters, of which some are bad after its update."""
    names = Names()
    named = [
        (f"parameters.{names.tensor(param) or number}", param)
        for number, param in enumerate(params_of(optimizer))
    ]
    did = "the weights had taken the bad values already"
    return Finding(named, optimizer, did=did, is_after_update=True)


def statistics_found(bad: list[Named], optimizer: Optimizer | None) -> Finding:
    """Running statistics that have gone bad, though the weights may be fine."""
    named = [(f"buffers.{name}", tensor) for name, tensor in bad]
    did = "the running statistics had taken the bad values already"
    return Finding(named, optimizer, did=did, is_after_update=True)


def incident_of(finding: Finding, evidence: Evidence, *, strategy: str) -> Incident:
    """The incident as it was noticed: which values, in which step, and what was done."""
    named = [*finding.named, *evidence.bad_inputs.items()]
    did = "nothing was changed" if strategy == "warn" else finding.did
    return Incident(
        step=noticed_step(finding, evidence),
        rank=rank(),
        world=world_size(),
        time=time.time(),
        reports=tuple(bad_reports(named, described=_DESCRIBED)),
        outcome=Outcome(strategy=strategy, detail=did),
    )


@one_look()
def explained(
    incident: Incident,
    finding: Finding,
    evidence: Evidence,
    tracing: Tracing,
    settings: GuardSettings,
) -> Incident:
    """The incident with origin and diagnosis, as far as they can be known here.

    Its step becomes the one in which the value was born.
    """
    from stayfinite.explain.rules import diagnose  # late: a healthy run needs no rules

    tensors = [tensor for _, tensor in finding.named]
    found = tracing.origin(tensors, folder=settings.folder, of=finding.optimizer)
    origin = found[0] if found else origin_from_graph(tensors)
    if origin is None:
        return incident
    noticed = incident.step
    born = noticed if found is None or found[1] is None else min(noticed, found[1])
    facts = {**origin.facts, "noticed_step": noticed}
    origin = dataclasses.replace(origin, facts=facts, phase=_phase(origin, incident))
    locations = tuple(report.location for report in incident.reports)
    context = evidence.context(finding.optimizer, step=born, locations=locations)
    done = "" if incident.outcome is None else incident.outcome.strategy
    is_undone = settings.is_undone or done == "recover"
    diagnosis = diagnose(origin, dataclasses.replace(context, is_undone=is_undone))
    return dataclasses.replace(incident, step=born, origin=origin, diagnosis=diagnosis)


def _phase(origin: Origin, incident: Incident) -> Phase:
    """A gradient that changed after it was computed was given by another rank, if there are any."""
    came = origin.lineage[0].kind == "foreign" if origin.lineage else False
    if incident.world > 1 and came and not origin.op and origin.phase == "backward":
        return "distributed"
    return origin.phase


def in_short(incident: Incident) -> str:
    """What is not finite, why, and in which line, as far as that is known."""
    where = incident.reports[0].location if incident.reports else "a value"
    cause = "" if incident.diagnosis is None else incident.diagnosis.cause
    origin = incident.origin
    at = f"{origin.file}:{origin.line}" if origin is not None and origin.file else ""
    known = " at ".join(filter(None, (cause, at)))
    return f"{where} is not finite{on_rank(incident)}" + (f" ({known})" if known else "")


def noticed_step(finding: Finding, evidence: Evidence) -> int:
    """Updates attempted before on its optimizer; without one, backward passes."""
    if finding.optimizer is None:
        return evidence.steps if evidence.has_stepped or not _is_optimized(evidence) else 0
    # The update that made the parameters bad has been counted already.
    return max(0, evidence.count(finding.optimizer) - finding.is_after_update)


def _is_optimized(evidence: Evidence) -> bool:
    """Whether an optimizer is there whose first update of what is trained is still to come."""
    trained = set(map(id, evidence.trained))
    params = (param for optimizer in _living_optimizers() for param in params_of(optimizer))
    return any(not trained or id(param) in trained for param in params)


def optimizer_behind(loss: Tensor, evidence: Evidence) -> Optimizer | None:
    """Whose update this loss is for: of those that it reaches, the one that has waited longest.

    A generator's loss reaches the discriminator too, but that has just stepped.
    """
    leaves = set(map(id, leaves_of([loss])))
    owners: dict[frozenset[int], Optimizer] = {}
    for optimizer in sorted(_living_optimizers(), key=evidence.count):
        reached = frozenset(leaves.intersection(map(id, params_of(optimizer))))
        if reached:
            owners[reached] = optimizer  # a wrapper has the same ones, and never steps itself
    return min(owners.values(), key=evidence.last_turn, default=None)


def _living_optimizers() -> list[Optimizer]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
