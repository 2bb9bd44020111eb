"""The time for experiments and for trials of changes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from stayfinite.runner.scene import Scene
from stayfinite.runner.second import why_not
from stayfinite.runner.tree import ProcessRecord


@dataclass
class Budget:
    """Seconds that may be spent in all."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.began + self.seconds - time.monotonic()


def may_try(scene: Scene, records: list[ProcessRecord]) -> bool:
    """Whether the script may be run again to prove something."""
    return scene.options.prove > 0 and not scene.is_rank and why_not(scene, records) is None
