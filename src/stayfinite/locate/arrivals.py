"""Bad values that no operation was seen to make, though they belong to what a step computes."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from stayfinite.locate.backward import NodeSites
from stayfinite.locate.events import Site
from stayfinite.records import Phase

Arrival = tuple[Phase, Site]


class Arrivals:
    """Tells values of a step's graph and gradients of parameters from what came in as data.

    Native code, a hook below the dispatcher or a flipped bit may change them; an operation
    that is traced would have been seen.
    """

    def __init__(self, nodes: NodeSites) -> None:
        self._nodes = nodes
        self._roots: WeakSet[nn.Module] = WeakSet()

    def entered(self, root: nn.Module) -> None:
        """A top-level module is called: its parameters have gradients that may arrive."""
        self._roots.add(root)

    def of(self, tensor: Tensor) -> Arrival | None:
        """In which pass the value was computed, and where; None for what may be data."""
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:
            return None
        if tensor.grad_fn is not None:
            site = self._nodes.get(tensor.grad_fn)
            return None if site is None else ("forward", site)
        site = self._in_backward(torch._C._current_autograd_node()) or self._of_gradient(tensor)
        return None if site is None else ("backward", site)

    def _in_backward(self, node: Any) -> Site | None:
        """What is first met there is a gradient: bad data were met in the forward pass."""
        if node is None:
            return None
        variable = getattr(node, "variable", None)  # of AccumulateGrad
        if variable is None:
            return self._nodes.get(node)
        return self._owner(lambda param: param is variable) or Site(None)

    def _of_gradient(self, tensor: Tensor) -> Site | None:
        address = tensor.data_ptr()
        return self._owner(lambda param: param.grad is not None and _address(param.grad) == address)

    def _owner(self, is_it: Any) -> Site | None:
        """The module whose own parameter it is, as a site without a line."""
        for root in list(self._roots):
            for module in root.modules():
                if any(is_it(param) for param in module.parameters(recurse=False)):
                    return Site(None, (root, module) if module is not root else (root,))
        return None


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0
