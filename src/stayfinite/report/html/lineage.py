"""The way of a bad value, from its birth to where it was noticed, as a graph of stations.

Each pass has a lane of its own; the line changes lanes where the value went from the forward pass
into the backward one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from stayfinite import text as wording
from stayfinite.records import Hop, Incident
from stayfinite.report.html.charts import unit
from stayfinite.report.html.markup import tag

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
    width: int


def lineage(incident: Incident) -> Lineage | None:
    """None where the way is not known."""
    hops = incident.origin.lineage if incident.origin else ()
    if not hops:
        return None
    lanes = tuple(dict.fromkeys(hop.phase for hop in hops))
    stations = tuple(_stations(incident, hops, lanes))
    width = _LANE * (len(lanes) + 1)
    return Lineage(picture=_picture(stations, width), stations=stations, lanes=lanes, width=width)


def _stations(incident: Incident, hops: Sequence[Hop], lanes: tuple[str, ...]) -> Iterator[Station]:
    shown, left = _shown(hops), 0
    for at, hop in enumerate(hops):
        if at not in shown:
            left += 1
            continue
        if left:
            yield Station(kind="more", what=wording.count(left, "more op"), lane=_lane(hop, lanes))
            left = 0
        yield _station(hop, lanes)
    value, what = wording.seen_kind(incident), f"noticed in {wording.noticed(incident)}"
    yield Station(kind="end", value=value, what=what, lane=_lane(hops[-1], lanes))


def _shown(hops: Sequence[Hop]) -> set[int]:
    """All, or the first and last ones and every change."""
    if len(hops) <= _MOST:
        return set(range(len(hops)))
    turns = [at for at, hop in enumerate(hops) if hop.kind != "spread"]
    changes = [at for at in range(1, len(hops)) if hops[at].phase != hops[at - 1].phase]
    ends = {0, 1, 2, len(hops) - 2, len(hops) - 1}
    return ends | set((turns + changes)[: _MOST - len(ends)])


def _station(hop: Hop, lanes: tuple[str, ...]) -> Station:
    place = wording.plain(hop.file or "").replace("\\", "/").rsplit("/", 1)[-1]
    line = f"{place}:{hop.line}" if place and hop.line is not None else place
    module = f"module {wording.plain(hop.module)}" if hop.module else ""
    return Station(
        kind=hop.kind,
        value=wording.KINDS[hop.nan_type],
        what=f"{_VERBS.get(hop.kind, 'began')} at {wording.short_op(hop.op)}",
        where=", ".join(filter(None, (line, module))),
        code=wording.plain(hop.code.strip()),
        lane=_lane(hop, lanes),
    )


def _lane(hop: Hop, lanes: tuple[str, ...]) -> int:
    return lanes.index(hop.phase)


def _picture(stations: Sequence[Station], width: int) -> Markup:
    places = [(_LANE * (each.lane + 1), ROW * at + ROW / 2) for at, each in enumerate(stations)]
    pieces = [tag("path", class_="sf-rail", d=_rail(places))]
    pieces += [_node(each.kind, *place) for each, place in zip(stations, places, strict=True)]
    high = ROW * len(stations)
    words = {"viewBox": f"0 0 {width} {high}", "aria-hidden": "true"}
    return tag("svg", Markup("").join(pieces), class_="sf-graph", width=width, height=high, **words)


def _rail(places: Sequence[tuple[float, float]]) -> str:
    """Straight down, with a soft bend where the lane changes."""
    (x, y), *rest = places
    words = [f"M{unit(x)} {unit(y)}"]
    for to_x, to_y in rest:
        middle = unit((y + to_y) / 2)
        bend = f"C{unit(x)} {middle} {unit(to_x)} {middle} {unit(to_x)} {unit(to_y)}"
        words.append(f"V{unit(to_y)}" if x == to_x else bend)
        x, y = to_x, to_y
    return "".join(words)


def _node(kind: str, x: float, y: float) -> Markup:
    at = {"cx": unit(x), "cy": unit(y)}
    if kind == "more":
        dots = (
            tag("circle", class_="sf-n-more", r=2, cx=unit(x), cy=unit(y + d)) for d in (-8, 0, 8)
        )
        return Markup("").join(dots)
    if kind == "spread":
        return tag("circle", class_="sf-n-spread", r=5, **at)
    if kind == "conversion":
        return tag("circle", class_="sf-n-conversion", r=7, **at)
    if kind == "end":
        box: dict[str, Any] = {"x": unit(x - 8), "y": unit(y - 8), "width": 16, "height": 16}
        return tag("rect", class_="sf-n-end", rx=3, **box)
    return tag("circle", class_="sf-n-birth", r=9, **at) + tag(
        "circle", class_="sf-n-core", r=3, **at
    )
