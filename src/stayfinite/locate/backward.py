"""From an autograd node back to the forward operation that made it.

A node takes its number just before its operation reaches the dispatcher, so the
operation that sees a new number is the one that made the node. This needs no
anomaly mode and no formatted stacks.
"""

from __future__ import annotations

from collections import deque
from types import FrameType
from typing import Any

import torch
from torch.utils import checkpoint

from stayfinite.locate.events import Site
from stayfinite.locate.source import ENGINE, kind_of

_KEEP = 400_000
_UNNUMBERED = 2**63  # AccumulateGrad has the largest number there is


class NodeSites:
    """Where each autograd node was made, by its sequence number."""

    def __init__(self) -> None:
        self._sites: dict[int, Site] = {}
        self._next = _number()
        self._fresh = False
        self.newest = range(0)
        """The numbers of the nodes that were made last."""
        self._recent: deque[Any] = deque(maxlen=256)

    def is_new(self) -> bool:
        """Whether the operation that runs now has made a node."""
        self._remember_running()
        self._fresh = _number() > self._next
        return self._fresh

    def latest_is_fresh(self) -> bool:
        return self._fresh

    def put(self, site: Site) -> None:
        number = _number()
        self.newest = range(max(self._next, number - 4), number)
        for made in self.newest:
            self._sites[made] = site
        self._next = number
        if len(self._sites) > _KEEP:
            for old in list(self._sites)[: _KEEP // 2]:
                del self._sites[old]

    def get(self, node: Any) -> Site | None:
        number = node._sequence_nr()
        return self._sites.get(number) if number < _UNNUMBERED else None

    def consumers(self, *, depth: int = 6) -> list[str]:
        """Names of the nodes whose gradient came to the one running now, the nearest first."""
        running = torch._C._current_autograd_node()
        near: list[Any] = [running] if running is not None else []
        found: list[str] = []
        for _ in range(depth):
            near = [
                node
                for node in self._recent
                if any(after is other for after, _ in node.next_functions for other in near)
            ]
            found.extend(node.name() for node in near if node.name() not in found)
        return found

    def _remember_running(self) -> None:
        node = torch._C._current_autograd_node()
        if node is not None and not (self._recent and self._recent[-1] is node):
            self._recent.append(node)
        elif node is None and self._recent:
            self._recent.clear()  # do not keep a finished graph alive

    @staticmethod
    def is_recomputation(frame: FrameType | None) -> bool:
        """Whether activation checkpointing is running the forward again inside a backward."""
        while frame is not None and kind_of(frame.f_code) != ENGINE:
            if frame.f_code.co_filename == checkpoint.__file__:
                return True
            frame = frame.f_back
        return False


def _number() -> int:
    return int(torch._C._autograd._get_sequence_nr())
