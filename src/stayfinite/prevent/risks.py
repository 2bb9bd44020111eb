"""A risk: what can end training with NaN or Inf, seen before it does. No torch here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from stayfinite.causes import CAUSES
from stayfinite.errors import ConfigError
from stayfinite.settings import require_choice

Level = Literal["high", "medium", "low"]
LEVELS: tuple[Level, ...] = get_args(Level)
Evidence = dict[str, float | int | str]


@dataclass(frozen=True, kw_only=True)
class Risk:
    """One thing to change before training begins.

    `what` is one sentence, `where` a module, a parameter or file:line, `cause` a slug of the
    catalogue, and `evidence` the numbers behind it. Within a level, a higher `score` comes first.
    A risk that is "high" or "medium" is a warning; a "low" one is worth knowing.

    >>> print(Risk(level="low", what="It is 0.", where="w", fix="Draw it.", cause="bad_init"))
    low: w: It is 0. Draw it.
    """

    level: Level
    what: str
    where: str
    fix: str
    cause: str
    evidence: dict[str, float | int | str] = field(default_factory=dict)
    score: float = 0.0

    def __post_init__(self) -> None:
        require_choice("level", self.level, LEVELS)
        if self.cause not in CAUSES:
            raise ConfigError(f"cause is {self.cause!r}; it must be a slug of the catalogue.")
        if math.isnan(self.score):
            raise ConfigError("score is nan; it must be a number.")

    @property
    def is_warning(self) -> bool:
        return self.level != "low"

    @property
    def rank(self) -> tuple[Any, ...]:
        """What risks are sorted by: the worst one is first."""
        return LEVELS.index(self.level), -self.score, self.where, self.cause, self.what

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.what} {self.fix}"


def risk_of(
    level: Level,
    cause: str,
    what: str,
    where: str = "",
    evidence: Evidence | None = None,
    *,
    fix: str | None = None,
    score: float = 0.0,
) -> Risk:
    """A risk with the fix of its cause, if it has no better one; its place may come later."""
    return Risk(
        level=level,
        cause=cause,
        what=what,
        where=where,
        evidence=evidence or {},
        fix=fix or CAUSES[cause].fix,
        score=score,
    )


def rank_risks(risks: Iterable[Risk]) -> list[Risk]:
    """All of them, the worst first; what is said twice of one place is kept once."""
    first: dict[tuple[str, str, str], Risk] = {}
    for risk in sorted(risks, key=lambda risk: risk.rank):
        first.setdefault((risk.where, risk.cause, risk.what), risk)
    return list(first.values())


def worst_of_each(risks: Iterable[Risk]) -> list[Risk]:
    """For each place and cause the worst; the worst of all first."""
    kept: dict[tuple[str, str], Risk] = {}
    for risk in rank_risks(risks):
        kept.setdefault((risk.where, risk.cause), risk)
    return list(kept.values())


def proven(risks: list[Risk], edges: list[Risk]) -> list[Risk]:
    """The risks with what the probe showed: a proof for a known place, or a new risk."""
    proofs: dict[str, Risk] = {}
    for edge in edges:
        proofs.setdefault(edge.where, edge)
    shown: list[Risk] = []
    for risk in risks:
        if risk.is_warning and risk.where in proofs:
            name = proofs[risk.where].evidence["probe"]
            what = f"{risk.what} A pass with {name} shows it."
            evidence = {**risk.evidence, "probe": name}
            risk = dataclasses.replace(risk, what=what, evidence=evidence, score=risk.score + 1)
        shown.append(risk)
    known = {risk.where for risk in risks if risk.is_warning}
    return [*shown, *(edge for where, edge in proofs.items() if where not in known)]


def as_info(risk: Risk) -> Risk:
    """The same as something worth knowing only."""
    return dataclasses.replace(risk, level="low")
