"""The second run."""

from __future__ import annotations

from stayfinite.records import RunResult
from stayfinite.runner.scene import Scene
from stayfinite.runner.tree import ProcessRecord


def look_again(
    scene: Scene, records: list[ProcessRecord], result: RunResult
) -> tuple[RunResult, list[str]]:
    return result, []
