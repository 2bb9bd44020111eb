"""Ranks that share a bad step tell each other where it began."""

from __future__ import annotations

import dataclasses
import itertools
import logging

from stayfinite.distributed import heard, most_certain, tell
from stayfinite.guard.job import Job
from stayfinite.records import Incident, from_json, to_json

logger = logging.getLogger("stayfinite")
_numbers = itertools.count(1)  # of the whole process: what an earlier guard told is not heard again


def shared(job: Job, incident: Incident) -> Incident:
    """The incident of the rank where it began; this rank's own if it began here too.

    Its rank is -1 if no rank knows. All ranks of the job must ask together.
    """
    if not job.is_distributed or incident.world == 1:
        return incident
    topic, certainty = f"incident {next(_numbers)}", _certainty(incident)
    if certainty:
        _tell(topic, incident)
    rank, highest = most_certain(certainty)
    if not highest:
        return dataclasses.replace(incident, rank=-1)
    if certainty == highest:
        return incident
    return _told_by(rank, topic) or dataclasses.replace(incident, rank=rank)


def _certainty(incident: Incident) -> int:
    """How certain it is that it began here: 2 seen, 1 the loss is bad before any all-reduce."""
    origin = incident.origin
    if origin is not None and origin.exact:
        return 0 if origin.phase == "distributed" else 2
    return int(any(report.location == "loss" for report in incident.reports))


def _tell(topic: str, incident: Incident) -> None:
    try:
        tell(topic, to_json(incident))
    except Exception:
        logger.warning("the other ranks could not be told of an incident", exc_info=True)


def _told_by(rank: int, topic: str) -> Incident | None:
    try:
        return from_json(Incident, heard(rank, topic))
    except Exception:
        logger.warning("rank %d was not heard about its incident", rank, exc_info=True)
        return None
