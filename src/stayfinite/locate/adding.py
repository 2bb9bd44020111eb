"""Which sums a bad value went through on its way to the loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stayfinite.locate.events import Event

# What may follow the sum of a loss's terms, before the loss is complete.
_AFTER = {"add", "sub", "mul", "div", "sum", "mean", "neg", "stack", "cat", "view", "squeeze"}


def sums_of_loss(hops: list[Event], events: Iterable[Event]) -> list[dict[str, Any]]:
    """The sums among the hops that end in the loss, the last one first, with their terms.

    What one operation of a sum does not know of a term, another one may.
    """
    forward = [hop for hop in hops if hop.phase == "forward"]
    known = [event.facts["sum"] for event in events if event.facts.get("sum")]
    found: list[dict[str, Any]] = []
    for hop in reversed(forward):
        here = hop.facts.get("sum")
        if here is not None and all(here["where"] != other["where"] for other in found):
            found.append(_merged(here["where"], known))
        if _bare(hop.op) not in _AFTER:
            break
    return [each for each in found if _tells(each)][:2]


def _merged(where: list[Any], known: list[dict[str, Any]]) -> dict[str, Any]:
    terms: dict[tuple[int, ...], list[Any]] = {}
    for facts in known:
        if facts["where"] == where:
            for name, bad, at in facts["terms"]:
                old = terms.get(tuple(at))
                if old is None or old[1] is None:
                    terms[tuple(at)] = [name, bad]
    return {"where": where, "terms": [terms[at] for at in sorted(terms)]}


def _tells(each: dict[str, Any]) -> bool:
    """Whether some terms are bad, and others are not."""
    flags = [bad for _, bad in each["terms"]]
    return any(flags) and ("" in flags or len(flags) == 1)


def _bare(op: str) -> str:
    parts = op.split(".")
    return (parts[1] if len(parts) > 1 else op).rstrip("_")
