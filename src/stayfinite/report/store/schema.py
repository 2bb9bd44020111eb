"""The lines of a run directory.

A run directory has a file `rank-0.jsonl`, and one for each other rank. Lines are only added, each
is a JSON object with its `kind`:

- `begin`: `schema` and `run`, a RunInfo.
- `steps`: columns, a value for each of several steps of one optimizer, null where it is not known.
- `layers`: the names of the layers, whenever they change; of one optimizer.
- `norms`: of one sampled step, a value for each layer: the norm of its gradient, and its headroom,
  the doublings that are left until the largest element overflows its dtype.
- `incident`, `forecast`: a record.
- `end`: `exit`, `code` and `time`.

`result.json` is there when `stayfinite run` has ended: its incidents are explained best.
Non-finite numbers are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1
RESULT = "result.json"
COLUMNS = ("step", "time", "seconds", "loss", "norm", "lr", "scale", "skipped")
"""Of a `steps` line. `time` is in seconds since the beginning, `seconds` what the step took,
`skipped` is 1 where the update was left out; `terms` has more columns, by the name of a term."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What was run, with what, and where."""

    started: float
    script: str = ""
    command: tuple[str, ...] = ()
    cwd: str = ""
    rank: int = 0
    world: int = 1
    pid: int = 0
    host: str = ""
    python: str = ""
    platform: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    is_dirty: bool = False
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Files of the script's folder, each with its checksum; what `compare` tells of code."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How the process ended."""

    exit: str
    code: int = 0
    time: float = 0.0


@dataclass(slots=True)
class StepRow:
    """One attempted update."""

    step: int
    time: float
    seconds: float | None = None
    loss: float | None = None
    norm: float | None = None
    lr: float | None = None
    scale: float | None = None
    skipped: bool = False
    terms: dict[str, float] | None = None
    optimizer: int = 0


@dataclass(slots=True)
class LayerRow:
    """The sampled gradients of one step."""

    step: int
    norms: list[float]
    headroom: list[float]
    optimizer: int = 0
