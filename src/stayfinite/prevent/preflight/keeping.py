"""What passes of our own may change, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stayfinite.snapshot import Snapshot


class Keeper:
    """Modules, gradients and random states as they were.

    A loss function may call modules and use tensors that nobody named: they are added when they
    are met, before they change.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._snapshots = [Snapshot(modules)]
        self._known = {id(part) for module in modules for part in module.modules()}
        self._gradients: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    def add_module(self, module: nn.Module) -> None:
        """A module that is about to be called."""
        if id(module) not in self._known:
            self._known.update(id(part) for part in module.modules())
            self._snapshots.append(Snapshot([module]))

    def add_leaves(self, loss: Tensor) -> None:
        """All tensors that a backward pass from the loss will give a gradient."""
        for leaf in _leaves(loss):
            gradient = leaf.grad
            kept = None if gradient is None else gradient.detach().clone()
            self._gradients.setdefault(id(leaf), (leaf, gradient, kept))

    def restore(self) -> None:
        """Put all back; the earliest state comes last."""
        with torch.no_grad():
            for leaf, gradient, kept in self._gradients.values():
                if gradient is not None and kept is not None:
                    gradient.copy_(kept)
                leaf.grad = gradient
        for snapshot in reversed(self._snapshots):
            snapshot.restore()


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            yield variable
        waiting.extend(following for following, _ in node.next_functions)
