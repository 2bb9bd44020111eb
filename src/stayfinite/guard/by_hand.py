"""Updates that no torch optimizer makes: by hand, or by the optimizer of another library."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stayfinite.detect.finite import all_finite
from stayfinite.living import nodes_of
from stayfinite.training import Pairs

_MOST_LOOKS = 64  # backward passes after which it is known who makes the updates
_MOST_KEPT = 4  # leaves that are compared, and elements of each
_MOST_ELEMENTS = 256


class UpdatesByHand:
    """Tells whether weights change between backward passes though no torch optimizer steps.

    No hook tells of such an update, so gradients have to be judged as soon as they are there.
    """

    def __init__(self) -> None:
        self.is_known = False
        self.is_dropped = False  # whether the gradients of the pass under way are to be 0
        self._looks = 0
        self._kept: list[tuple[weakref.ref[Tensor], Tensor]] = []
        self._roots: list[weakref.ref[Tensor]] = []

    def before_pass(self, roots: Sequence[Tensor]) -> None:
        """A backward pass begins from these roots, and no torch optimizer has stepped so far."""
        self.is_dropped = False
        self._roots = [weakref.ref(root) for root in roots]
        kept, self._kept = self._kept, []
        pairs = [(leaf, then) for ref, then in kept if (leaf := ref()) is not None]
        # host sync, in the first passes
        self.is_known = self.is_known or any(not _some_of(a).equal(b) for a, b in pairs)

    def after_pass(self, leaves: Iterable[Tensor]) -> Pairs:
        """The gradients that a pass has left to an update by hand; none if no such is known."""
        held = [(leaf, leaf.grad) for leaf in leaves]
        pairs = [(leaf, grad) for leaf, grad in held if grad is not None]
        if self.is_known:
            return pairs
        if self._looks < _MOST_LOOKS:
            self._looks += 1
            small = sorted((leaf for leaf, _ in pairs), key=Tensor.numel)[:_MOST_KEPT]
            plain = [leaf for leaf in small if type(leaf.data) is Tensor]
            self._kept = [(weakref.ref(leaf), _some_of(leaf).clone()) for leaf in plain]
        return []

    def are_bad(self, pairs: Pairs) -> bool:
        """Whether they are not finite, and not by the overflow of a loss scale of the script's."""
        if all_finite(gradient for _, gradient in pairs):
            return False
        roots = [root for ref in self._roots if (root := ref()) is not None]
        return not has_half_precision(roots)

    @staticmethod
    @torch.no_grad()
    def drop(pairs: Pairs) -> None:
        """Make them 0: with an update by hand that leaves the weights as they are."""
        for _, gradient in pairs:
            gradient.zero_()


def has_half_precision(roots: Iterable[Tensor]) -> bool:
    """Whether float16 is in the graph behind the roots; it needs a loss scale."""
    # Private: torch has no public way to the type of a gradient on its way.
    return any(
        made.dtype is torch.float16
        for node in nodes_of(roots)
        for made in getattr(node, "_input_metadata", ())
    )


def _some_of(leaf: Tensor) -> Tensor:
    return leaf.detach().reshape(-1)[:_MOST_ELEMENTS]
