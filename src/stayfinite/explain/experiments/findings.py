"""What an experiment showed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stayfinite.explain.experiments.replays import Change

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
