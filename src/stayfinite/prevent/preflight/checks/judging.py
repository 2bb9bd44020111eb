"""All recorded operations against all checks: the risks of lines."""

from __future__ import annotations

from collections.abc import Iterable

from stayfinite.locate.events import Site
from stayfinite.prevent.preflight.checks import (
    angles,
    decompositions,
    divisions,
    exponentials,
    layers,
    logs,
    losses,
    masks,
    roots,
    selections,
)
from stayfinite.prevent.preflight.checks.claim import Check
from stayfinite.prevent.preflight.ranges.reach import Reach
from stayfinite.prevent.preflight.scene import Scene
from stayfinite.prevent.preflight.use import Use
from stayfinite.prevent.risks import Risk

FAMILIES = (
    logs,
    exponentials,
    divisions,
    roots,
    angles,
    selections,
    masks,
    losses,
    decompositions,
    layers,
)
CHECKS: dict[str, tuple[Check, ...]] = {
    name: checks for family in FAMILIES for name, checks in family.CHECKS.items()
}


def line_risks(uses: Iterable[Use], roots: Iterable[Reach], scene: Scene) -> list[Risk]:
    """The risks of those operations that lead to a loss or to a gradient, each line once."""
    leading = _leading_to(roots)
    found: list[tuple[str, Risk]] = []
    claimed: set[int] = set()
    for use in uses:
        if use.phase != "backward" and id(use.made) not in leading:
            continue
        for check in CHECKS.get(use.name, ()):
            claim = check(use)
            if claim is None or id(claim.of) in claimed:
                continue
            if claim.of is not None:
                claimed.add(id(claim.of))
            found.append((use.name, scene.risk(_site(use), claim)))
    return _worst_of_lines(found)


def _worst_of_lines(found: list[tuple[str, Risk]]) -> list[Risk]:
    """For each line and operation the worst."""
    kept: dict[tuple[str, str], Risk] = {}
    for name, risk in sorted(found, key=lambda pair: pair[1].rank):
        kept.setdefault((risk.where, name), risk)
    return list(kept.values())


def _site(use: Use) -> Site:
    site = use.site
    return Site(use.place, site.modules, site.entry)


def _leading_to(roots: Iterable[Reach]) -> set[int]:
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        reach = waiting.pop()
        if id(reach) not in seen:
            seen.add(id(reach))
            waiting.extend(reach.made_from)
    return seen
