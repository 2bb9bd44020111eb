"""Risks from several looks at the same training, put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from stayfinite.prevent.risks import Risk, ranked


def said_once(risks: Iterable[Risk]) -> list[Risk]:
    """For each place and cause the worst."""
    kept: dict[tuple[str, str], Risk] = {}
    for risk in ranked(risks):
        kept.setdefault((risk.where, risk.cause), risk)
    return list(kept.values())


def proven(risks: list[Risk], edges: list[Risk]) -> list[Risk]:
    """The risks with what the probe showed: a proof for a known place, or a new risk."""
    proofs: dict[str, Risk] = {}
    for edge in edges:
        proofs.setdefault(edge.where, edge)
    known = {risk.where for risk in risks if risk.is_warning}
    new = [edge for where, edge in proofs.items() if where not in known]
    return [*(_with_proof(risk, proofs.get(risk.where)) for risk in risks), *new]


def _with_proof(risk: Risk, proof: Risk | None) -> Risk:
    if proof is None or not risk.is_warning:
        return risk
    name = proof.evidence["probe"]
    what = f"{risk.what} A pass with {name} shows it."
    evidence = {**risk.evidence, "probe": name}
    return dataclasses.replace(risk, what=what, evidence=evidence, score=risk.score + 1)


def lowered(risk: Risk) -> Risk:
    """The same as something worth knowing only."""
    return dataclasses.replace(risk, level="low")
