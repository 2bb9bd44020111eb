"""The terms of a loss in its autograd graph, where the root is a sum."""

from __future__ import annotations

import ast
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import graph

from stayfinite.detect.entrypoints import together, wrapped
from stayfinite.locate.backward import NodeSites
from stayfinite.locate.source import Place
from stayfinite.locate.terms import node_at, short_name

_SUMS = ("Add", "Sub")
_LISTS = ("Stack", "Cat")
# They do not change which terms there are: weights, means, casts and shapes.
_AROUND = (
    "Mul", "Div", "Neg", "Mean", "Sum", "ToCopy", "View", "ReshapeAlias", "Squeeze", "Unsqueeze",
    "Alias", "Clone",
)  # fmt: skip
_MOST_NODES = 200_000


class LossTerm(NamedTuple):
    """One term: the node that made it, which of its outputs, and its name in the user's line."""

    node: Any
    output: int
    name: str


class LossSum(NamedTuple):
    """The sum itself: its line, and the terms that have a gradient."""

    file: str
    line: int
    terms: tuple[LossTerm, ...]


def loss_sum(roots: Iterable[Tensor], sites: NodeSites) -> LossSum | None:
    """The sum at the root of a graph; None if there is not exactly one, of two terms or more."""
    edges = [(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None]
    if len(edges) != 1:
        return None
    walk = _Walk(sites)
    walk.visit(edges[0], "")
    if walk.place is None or len(walk.terms) < 2:
        return None
    terms = _renamed(walk.terms, walk.place)
    return LossSum(walk.place.code.co_filename, walk.place.line, terms)


def reaches(term: LossTerm, node: Any) -> bool:
    """Whether the node is in the graph behind the term."""
    wanted = node._sequence_nr()
    seen, waiting = {term.node}, [term.node]
    while waiting and len(seen) < _MOST_NODES:
        each = waiting.pop()
        if each._sequence_nr() == wanted:
            return True
        for after, _ in each.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return False


class _Walk:
    """From the root through the additions of one statement to what they add."""

    def __init__(self, sites: NodeSites) -> None:
        self._sites = sites
        self.place: Place | None = None
        self.terms: list[LossTerm] = []

    def visit(self, edge: tuple[Any, int], name: str) -> None:
        node, output = edge
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        after = [(number, each) for number, each in enumerate(node.next_functions) if each[0]]
        place = self._place_of(node) if kind in (*_SUMS, *_LISTS) else None
        if place is not None and len(after) > 1:
            self.place = self.place or place
            names = _names_at(place, len(node.next_functions))
            for number, each in after:
                self.visit(each, names[number])
        elif len(after) == 1 and (kind in _AROUND or place is not None):
            self.visit(after[0][1], name)
        else:
            self.terms.append(LossTerm(node, output, name))

    def _place_of(self, node: Any) -> Place | None:
        """Where the addition is, unless it belongs to another statement than the first one."""
        site = self._sites.get(node)
        place = site.place if site is not None else None
        if place is None or self.place is None:
            return place
        is_same = place.code is self.place.code and place.line == self.place.line
        return place if is_same else None


def _names_at(place: Place, count: int) -> list[str]:
    node = node_at(place)
    if isinstance(node, ast.BinOp):
        sides: list[ast.expr] = [node.left, node.right]
    elif isinstance(node, ast.AugAssign):
        sides = [node.target, node.value]
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.List):
        sides = list(node.args[0].elts)
    else:
        sides = []
    return [short_name(side) for side in sides] if len(sides) == count else [""] * count


def _renamed(terms: list[LossTerm], place: Place) -> tuple[LossTerm, ...]:
    """With a number where a name is missing, or where several have the same one."""
    node = node_at(place)
    whole = ""
    if isinstance(node, ast.Call) and node.args:
        argument = node.args[0]
        if isinstance(argument, (ast.List, ast.Tuple)) and len(argument.elts) == len(terms):
            names = [short_name(item) for item in argument.elts]
            return tuple(t._replace(name=n) for t, n in zip(terms, names, strict=True))
        whole = f" of {short_name(argument)}"
    known = Counter(term.name for term in terms)
    return tuple(
        term
        if term.name and known[term.name] == 1
        else term._replace(name=f"{term.name or 'term'} {number}{whole}")
        for number, term in enumerate(terms)
    )


@contextlib.contextmanager
def only_term(number: int, sites: Callable[[], NodeSites | None]) -> Iterator[list[str]]:
    """A block in which backward passes begin from one term of their loss alone.

    Gives the names of those that did; a pass whose loss has no such term runs as it is.
    """
    begun: list[str] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(roots: Any, gradients: Any = (), *args: Any, **kwargs: Any) -> Any:
            known = sites()
            tensors = [root for root in roots if isinstance(root, Tensor)]
            found = None if known is None else loss_sum(tensors, known)
            if found is None or number >= len(found.terms):
                return original(roots, gradients, *args, **kwargs)
            term = found.terms[number]
            begun.append(term.name)
            edge = graph.GradientEdge(term.node, term.output)
            return original((edge,), (_ones(term),), *args, **kwargs)

        return run

    attachment = together(
        wrapped(graph, "_engine_run_backward", wrap),
        wrapped(torch.autograd, "_engine_run_backward", wrap),
    )
    try:
        yield begun
    finally:
        attachment.remove()


def _ones(term: LossTerm) -> Tensor:
    made = term.node._input_metadata[term.output]
    return torch.ones(made.shape, dtype=made.dtype, device=made.device)
