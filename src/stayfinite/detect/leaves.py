"""The leaves of an autograd graph: the tensors whose gradients a backward pass fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def leaves_of(roots: Sequence[Tensor]) -> list[Tensor]:
    """Every leaf that requires a gradient behind the roots; walks the whole graph."""
    leaves: list[Tensor] = []
    seen: set[Any] = set()
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return leaves
