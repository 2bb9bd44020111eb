"""From traced events to the Origin that a person reads."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from stayfinite.living import Names
from stayfinite.locate.provenance import Event, Site, ancestors, guilty, path
from stayfinite.locate.source import relative, resolve
from stayfinite.records import Hop, Origin, Phase
from stayfinite.text import bare_name

_MOST_HOPS = 24
_LOADING = re.compile("load_(from_)?state_dict")


def origin_of(noticed: Iterable[Event], *, folder: str | None) -> tuple[Origin, Event] | None:
    """Where the noticed events began, and the event itself; None without events."""
    following = ancestors(noticed)
    event = guilty(following)
    if event is None:
        return None
    hops = path(event, following)
    phase, where, site = _place_of(event, hops)
    span = resolve(where.place, folder=folder)._asdict() if where.place else {}
    expression = span.pop("expression", None)
    names = Names()
    root, module = _module(site, names)
    origin = Origin(
        phase=phase,
        op=event.op or None,
        node=event.node,
        module=module,
        root=root,
        inputs=event.inputs,
        outputs=event.outputs,
        lineage=tuple(_hop(hop, names, folder) for hop in _both_ends(hops)),
        exact=True,
        facts=_facts(event, hops, expression)
        | _library(where)
        | _data_facts(hops, folder)
        | _loss_facts(hops, following, folder),
        **span,
    )
    return origin, event


def _library(where: Site) -> dict[str, Any]:
    """The line of an installed package that ran the operation, if the user's line called one."""
    if where.inner is None:
        return {}
    span = resolve(where.inner, folder=None)
    names = ("file", "line", "code", "function", "expression")
    return {"library": {name: getattr(span, name) for name in names}}


def _place_of(event: Event, hops: list[Event]) -> tuple[Phase, Site, Site]:
    """Phase, where its line is, and its module; for what nobody computed, where it came in."""
    if event.kind == "allocation":
        user = next((hop.site for hop in hops[1:] if hop.site.modules), event.site)
        return "init", event.site, user
    if event.kind != "foreign":
        return event.phase, event.site, event.site
    if event.phase == "checkpoint":
        return "checkpoint", event.site, Site(None)
    if event.facts.get("is_parameter"):
        return "init", event.site, event.site
    if (buffer := event.facts.get("buffer")) is not None:
        if buffer["given_at"] is not None:
            return "init", buffer["given_at"], Site(None)
        return "init", event.site, event.site
    if event.facts.get("carried"):
        return "data", event.site, event.site
    if event.phase != "data":  # computed, and changed by no operation
        return event.phase, event.site, event.site
    entry = next((hop.site.entry for hop in hops if hop.site.entry is not None), None)
    if entry is not None:
        return "data", Site(entry), Site(None)
    met = next((hop for hop in hops[1:] if hop.site.made_node), None)
    site = met.site if met is not None else event.site
    return "data", site, site


def _module(site: Site, names: Names) -> tuple[str | None, str | None]:
    return names.module(site.modules[-1], site.modules) if site.modules else (None, None)


def _was_there_before(event: Event) -> bool:
    """Whether it is a parameter, a buffer or a carried value that this step found bad: no data."""
    found = any(event.facts.get(name) for name in ("is_parameter", "buffer", "carried"))
    return event.kind == "foreign" and event.phase == "data" and found


def _hop(event: Event, names: Names, folder: str | None) -> Hop:
    span = resolve(event.site.place, folder=folder) if event.site.place else None
    return Hop(
        kind=event.kind,
        op=event.op,
        phase="init" if _was_there_before(event) else event.phase,
        node=event.node,
        file=span.file if span else None,
        line=span.line if span else None,
        code=span.code if span else "",
        module=_module(event.site, names)[1],
        nan_type=event.nan_type,
    )


def _both_ends(hops: list[Event]) -> list[Event]:
    """At most _MOST_HOPS: both ends and the conversions between them."""
    if len(hops) <= _MOST_HOPS:
        return hops
    half = _MOST_HOPS // 2
    turns = [hop for hop in hops[half:-half] if hop.kind == "conversion"]
    return [*hops[:half], *turns[: _MOST_HOPS // 4], *hops[-half:]]


def _facts(event: Event, hops: list[Event], expression: str | None) -> dict[str, Any]:
    apart = ("samples", "delivered", "sum", "term")
    facts = {name: fact for name, fact in event.facts.items() if name not in apart}
    if (buffer := facts.get("buffer")) is not None:
        facts["buffer"] = {**buffer, "given_at": buffer["given_at"] is not None}
    facts["expression"] = expression
    facts["reached"] = [hop.op for hop in hops[1:9]]
    facts["through"] = [i for hop in hops[1:9] if (i := hop.facts.get("inside"))]
    facts["loaded"] = any(_LOADING.search(hop.facts.get("inside") or "") for hop in hops)
    facts["clock"] = event.clock
    turn = next((hop for hop in hops[1:] if hop.kind == "conversion"), None)
    if turn is not None:
        facts["became_nan"] = {
            "op": turn.op,
            "node": turn.node,
            "inputs": [dataclasses.asdict(summary) for summary in turn.inputs],
        }
    if event.kind in ("foreign", "allocation"):
        facts["foreign"] = event.kind == "foreign" and event.facts.get("label") is None
    return facts


def _data_facts(hops: list[Event], folder: str | None) -> dict[str, Any]:
    """Which samples and files the value came from, as far as that is known."""
    samples = dict(hops[0].facts.get("samples") or {})
    delivered = next((d for hop in hops[:4] if (d := hop.facts.get("delivered"))), None)
    samples = {**samples, **delivered} if delivered else samples
    if delivered:  # the rows are those of the batch, and not of the sample
        samples.pop("table", None)
    if not samples:
        return {}
    files = [relative(path, folder) for path in samples.get("files", ())]
    samples |= {"files": files} if files else {}
    if "last_file" in samples:
        samples["last_file"] = relative(samples["last_file"], folder)
    return {"samples": samples}


def _loss_facts(
    hops: list[Event], following: dict[Event, Event | None], folder: str | None
) -> dict[str, Any]:
    """Which terms of the loss are bad, where it is a sum."""
    sums = sums_of_loss(hops, following)
    for each in sums:
        each["where"] = [relative(each["where"][0], folder), each["where"][1]]
    facts: dict[str, Any] = {"sums": sums} if sums else {}
    term = hops[0].facts.get("term")
    if term:
        file, line = term["where"]
        facts["term"] = {**term, "where": [relative(file, folder), line]}
    return facts


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
            found.append(_terms_at(here["where"], known))
        if bare_name(hop.op) not in _AFTER:
            break
    return [each for each in found if _is_telling(each)][:2]


def _terms_at(where: list[Any], known: list[dict[str, Any]]) -> dict[str, Any]:
    terms: dict[tuple[int, ...], list[Any]] = {}
    for facts in known:
        if facts["where"] == where:
            for name, bad, at in facts["terms"]:
                old = terms.get(tuple(at))
                if old is None or old[1] is None:
                    terms[tuple(at)] = [name, bad]
    return {"where": where, "terms": [terms[at] for at in sorted(terms)]}


def _is_telling(each: dict[str, Any]) -> bool:
    """Whether some terms are bad, and others are not."""
    flags = [bad for _, bad in each["terms"]]
    return any(flags) and ("" in flags or len(flags) == 1)
