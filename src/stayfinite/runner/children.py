"""Processes that the script starts with multiprocessing."""

from __future__ import annotations

from stayfinite.runner.watch import Watch


def watch_children(watch: Watch) -> None:
    """Have the children of this process watched."""
