"""The way of a bad value, from its birth to where it was noticed, as a graph of stations.

Each pass has a lane of its own; the line changes lanes where the value went from the forward pass
into the backward one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from stayfinite import text as wording
from stayfinite.records import Hop, Incident
from stayfinite.report.html.charts import tag, unit

ROW = 52  # pixels, as in the style sheet
_LANE = 22
_MOST = 12  # stations; of more the middle is left out
_VERBS = {"birth": "born", "foreign": "came in", "conversion": "became", "spread": "still"}


@dataclass(frozen=True, kw_only=True)
class Station:
    """A row beside the graph."""

    kind: str
    value: str = ""
    what: str
    where: str = ""
    code: str = ""
    lane: int = 0


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The graph and its rows; `lanes` are the passes, from left to right."""

    picture: Markup
    stations: tuple[Station, ...]
    lanes: tuple[str, ...]


def lineage(incident: Incident) -> Lineage | None:
    """None where the way is not known."""
    hops = incident.origin.lineage if incident.origin else ()
    if not hops:
        return None
    lanes = tuple(dict.fromkeys(hop.phase for hop in hops))
    stations = tuple(_stations(incident, hops, lanes))
    picture = _picture(stations, width=_LANE * (len(lanes) + 1))
    return Lineage(picture=picture, stations=stations, lanes=lanes)


def _stations(incident: Incident, hops: Sequence[Hop], lanes: tuple[str, ...]) -> Iterator[Station]:
    left, lane = 0, 0
    shown = _shown(hops)
    for at, hop in enumerate(hops):
        if at not in shown:
            left += 1
            continue
        lane = lanes.index(hop.phase)
        if left:
            yield Station(kind="more", what=wording.count(left, "more op"), lane=lane)
            left = 0
        module = f"module {wording.plain(hop.module)}" if hop.module else ""
        yield Station(
            kind=hop.kind,
            value=wording.KINDS[hop.nan_type],
            what=f"{_VERBS.get(hop.kind, 'began')} at {wording.short_op(hop.op)}",
            where=", ".join(filter(None, (wording.hop_line(hop), module))),
            code=wording.plain(hop.code.strip()),
            lane=lane,
        )
    value, what = wording.seen_kind(incident), f"noticed in {wording.noticed(incident)}"
    yield Station(kind="end", value=value, what=what, lane=lane)


def _shown(hops: Sequence[Hop]) -> set[int]:
    """All, or the first and last ones and every change."""
    if len(hops) <= _MOST:
        return set(range(len(hops)))
    turns = [at for at, hop in enumerate(hops) if hop.kind != "spread"]
    changes = [at for at in range(1, len(hops)) if hops[at].phase != hops[at - 1].phase]
    ends = {0, 1, 2, len(hops) - 2, len(hops) - 1}
    return ends | set((turns + changes)[: _MOST - len(ends)])


def _picture(stations: Sequence[Station], *, width: int) -> Markup:
    places = [(_LANE * (each.lane + 1), ROW * at + ROW / 2) for at, each in enumerate(stations)]
    rail = f"M{unit(places[0][0])} {unit(places[0][1])}"
    for (x, y), (to_x, to_y) in pairwise(places):  # a soft bend where the lane changes
        middle = unit((y + to_y) / 2)
        bend = f"C{unit(x)} {middle} {unit(to_x)} {middle} {unit(to_x)} {unit(to_y)}"
        rail += f"V{unit(to_y)}" if x == to_x else bend
    pieces = [tag("path", class_="sf-rail", d=rail)]
    pieces += [_node(each.kind, *place) for each, place in zip(stations, places, strict=True)]
    high = ROW * len(stations)
    words = {"viewBox": f"0 0 {width} {high}", "aria-hidden": "true"}
    return tag("svg", Markup("").join(pieces), class_="sf-graph", width=width, height=high, **words)


def _node(kind: str, x: float, y: float) -> Markup:
    def dot(name: str, r: int, down: int = 0) -> Markup:
        return tag("circle", class_=f"sf-n-{name}", r=r, cx=unit(x), cy=unit(y + down))

    if kind == "more":
        return Markup("").join(dot("more", 2, down) for down in (-8, 0, 8))
    if kind in ("spread", "conversion"):
        return dot(kind, 5 if kind == "spread" else 7)
    if kind == "end":
        box = {"x": unit(x - 8), "y": unit(y - 8), "width": "16", "height": "16"}
        return tag("rect", class_="sf-n-end", rx=3, **box)
    return dot("birth", 9) + dot("core", 3)
