"""What an experiment showed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stayfinite.explain.experiments.replays import Change
from stayfinite.records import Diagnosis

Verdict = Literal[
    "deterministic",  # the same failure each time
    "transient",  # it does not come back
    "inconclusive",  # neither
    "guilty",  # what was named makes the step bad, alone
    "innocent",  # it does not
    "depends",  # the step is finite without it, and that is all that is known
]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One experiment: what was seen, as a sentence, and what it means.

    `reproduces`: with the named cause alone the failure is there. `vanishes`: without it, the
    step is finite.
    """

    experiment: str
    verdict: Verdict
    sentence: str
    reproduces: bool = False
    vanishes: bool = False
    rows: tuple[int, ...] = ()
    removal: Change | None = None
    """What takes the named cause away."""

    @property
    def is_proof(self) -> bool:
        return self.reproduces and self.vanishes


def with_samples(finding: Finding, samples: Sequence[Any] | None, dataset: str) -> Finding:
    """The finding with the dataset's numbers of the rows that it names."""
    if not samples or not finding.rows or max(finding.rows) >= len(samples):
        return finding
    names = ", ".join(f"row {row} is sample {samples[row]}" for row in finding.rows)
    said = f"{finding.sentence} ({names} of the dataset {dataset})"
    return dataclasses.replace(finding, sentence=said)


def with_reason(diagnosis: Diagnosis, why_not: str | None) -> Diagnosis:
    """The diagnosis with the reason why no sample was looked for."""
    if why_not is None:
        return diagnosis
    said = f"the batch was not searched for a guilty sample: {why_not}"
    return dataclasses.replace(diagnosis, evidence=(*diagnosis.evidence, said))
