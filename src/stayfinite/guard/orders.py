"""A step that is to be run as a capsule has it: the first `guard.step` of a script gets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stayfinite.records import Incident

# Capsules are imported late: without an order there is no need of them.
if TYPE_CHECKING:
    from stayfinite.capsule.contents import Capsule
    from stayfinite.checkpoint.members import Members
    from stayfinite.guard.job import Job


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to run, and who is told the incident that comes of it, or None."""

    capsule: Capsule
    tell: Callable[[Incident | None], None]

    def put_state(self, job: Job) -> None:
        """Model, optimizer, schedulers, scaler and generators as before the step."""
        from stayfinite.capsule.state import put_random, put_state

        members = members_of(job)
        if self.capsule.state is not None:
            put_state(self.capsule.state, members)
        if self.capsule.random is not None:
            put_random(self.capsule.random)


_waiting: list[Order] = []


def give(order: Order) -> None:
    """Have the next `guard.step` of this process carry it out, which ends the script."""
    _waiting.append(order)


def take() -> Order | None:
    return _waiting.pop() if _waiting else None


def members_of(job: Job) -> Members:
    """The parts of a job, as a capsule holds them."""
    from stayfinite.checkpoint.members import Members

    parts = job.parts
    return Members(
        models=parts.modules,
        optimizers=(parts.optimizer,),
        schedulers=parts.schedulers,
        scaler=parts.scaler,
        averages=parts.emas,
    )


def carry_out(order: Order, job: Job, step: Callable[[Any], Any], incidents: list[Any]) -> None:
    """Run the batches of the capsule by `step(batch)`, tell, and leave the script."""
    order.put_state(job)
    before = len(incidents)
    for batch in order.capsule.batch:
        step(batch)
    order.tell(incidents[before] if len(incidents) > before else None)
    raise SystemExit(0)
