"""A first guess without a replay: what the autograd graph of a bad loss has kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from stayfinite.detect.scan import all_finite
from stayfinite.locate.names import Names
from stayfinite.records import Origin

_MOST_NODES = 20_000


def origin_from_graph(tensors: Iterable[Tensor]) -> Origin | None:
    """The earliest operation that handled a bad value, by its saved tensors; never exact.

    It knows neither line nor operator, only the autograd node and, where one of its inputs is
    a parameter, the module.
    """
    roots = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    bad = [node for node in _nodes(roots) if _has_bad_save(node)]
    if not bad:
        return None
    first = min(bad, key=lambda node: node._sequence_nr())
    module = _module(first)
    return Origin(phase="forward", node=first.name(), module=module, exact=False)


def _nodes(roots: list[Any]) -> list[Any]:
    seen: dict[Any, None] = {}
    waiting = list(roots)
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting.extend(after for after, _ in node.next_functions if after is not None)
    return list(seen)


def _has_bad_save(node: Any) -> bool:
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # freed, or changed in place since
                continue
            if isinstance(saved, Tensor) and not all_finite([saved]):
                return True
    return False


def _module(node: Any) -> str | None:
    names = Names()
    for following, _ in node.next_functions:
        leaf = getattr(following, "variable", None)
        name = names.tensor(leaf) if leaf is not None else None
        if name is not None:
            return name.rpartition(".")[0]
    return None
