"""Which term of a loss is bad, by the names in the user's own line and by its autograd graph."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import graph

from stayfinite.detect.finite import classify
from stayfinite.detect.hooks import wrap_engine
from stayfinite.locate.operators import Call, is_bad
from stayfinite.locate.provenance import NodeSites, running_node
from stayfinite.locate.source import ENGINE, USER, Place, kind_of, positions
from stayfinite.syntax import callee, names_in
from stayfinite.text import node_name

_SUM_NAMES = ("add", "add_", "sub", "sub_", "stack", "cat")
_MOST, _LONGEST_NAME = 24, 48
Node = ast.expr | ast.stmt
_At = tuple[int, int]


class Term(NamedTuple):
    """`bad` is the value of a NaNType, "" for finite, None if that is not known."""

    name: str
    bad: str | None
    at: _At


def sum_facts(call: Call, bad: Tensor, frame: FrameType | None) -> dict[str, Any] | None:
    """The terms of the sum that runs now, if the user's line is one; values of one number each,
    or of one for each sample."""
    if call.info.base not in _SUM_NAMES or bad.dim() > 1 or running_node() is not None:
        return None
    user = user_frame(frame)
    if user is None:
        return None
    node = node_at(Place(user.f_code, user.f_lasti, user.f_lineno))
    if node is None:
        return None
    terms = _terms(node, call, user)
    if len(terms) < 2 and not (terms and terms[0].at == _LOOP):
        return None
    where = [user.f_code.co_filename, getattr(node, "lineno", user.f_lineno)]
    return {"where": where, "terms": [list(term) for term in terms[:_MOST]]}


_LOOP = (0, 0)


def _terms(node: Node, call: Call, frame: FrameType) -> list[Term]:
    if isinstance(node, ast.Call):
        return _of_call(node, call, frame)
    sides = _sides(node)
    return _of_loop(node, sides[1], call, frame) or _of_pair(sides, call, frame) if sides else []


def _sides(node: Node | None) -> list[ast.expr]:
    """a and b of `a + b` and `a += b`; none of anything else."""
    if isinstance(node, ast.AugAssign):
        return [node.target, node.value]
    return [node.left, node.right] if isinstance(node, ast.BinOp) else []


def _of_pair(sides: list[ast.expr], call: Call, frame: FrameType) -> list[Term]:
    """a + b, where either may be a sum again."""
    operands = [*call.args, *call.kwargs.values()][:2]
    if len(operands) < 2:
        return []
    is_inplace = call.info.base.endswith("_")
    flags = [None if is_inplace else _flag(operands[0]), _flag(operands[1])]
    found = []
    for side, flag in zip(sides, flags, strict=True):
        leaves = _leaves(side)
        for leaf in leaves:
            known = flag if len(leaves) == 1 or flag == "" else None
            value = _value(_inner(leaf, frame), frame)
            if known is None and isinstance(value, Tensor):
                known = _flag(value)
            if not isinstance(value, (int, float)):
                found.append(Term(_name(leaf, frame), known, (leaf.lineno, leaf.col_offset)))
    return found


def _of_call(node: ast.Call, call: Call, frame: FrameType) -> list[Term]:
    """sum(losses), torch.stack([a, b]), and the like."""
    if callee(node) not in ("sum", "stack", "cat") or not node.args:
        return []
    members = _members(node.args[0], frame)
    given = call.args[0] if call.args and isinstance(call.args[0], (list, tuple)) else ()
    if len(given) == len(members):  # what was added up, and not what it was made of
        members = [(name, value) for (name, _), value in zip(members, given, strict=True)]
    return _of_members(members, node.lineno)


def _of_members(members: list[tuple[str, Any]], line: int) -> list[Term]:
    return [Term(name, _flag(value), (line, n)) for n, (name, value) in enumerate(members)]


def _of_loop(node: Node, value: ast.expr, call: Call, frame: FrameType) -> list[Term]:
    """`total = total + term` or `total += term`, for each of something."""
    loop = _loop_around(node, frame)
    if loop is None or not _adds_to_itself(node, loop) or _begins_anew(node, loop):
        return []
    members = _members(loop.iter, frame)
    if len(members) > 1 and all(_flag(value) is not None for _, value in members):
        return _of_members(members, loop.lineno)
    other = call.args[1] if len(call.args) > 1 else None
    if not _flag(other):
        return []
    labels = [_value(name, frame) for name in names_in(loop.target)]
    label = next((str(item) for item in labels if isinstance(item, (str, int))), None)
    return [Term(label or _name(value, frame), _flag(other), _LOOP)]


def _adds_to_itself(node: Node, loop: ast.For) -> bool:
    if isinstance(node, ast.AugAssign):
        return True
    return any(
        isinstance(each, ast.Assign)
        and each.value is node
        and isinstance(node, ast.BinOp)
        and ast.dump(node.left) == ast.dump(each.targets[0]).replace("Store()", "Load()")
        for each in ast.walk(loop)
    )


def _begins_anew(node: Node, loop: ast.For) -> bool:
    """Whether the loop gives the sum a new value each time, so that it is not over the loop."""
    target = next(iter(_sides(node)), None)
    if not isinstance(target, ast.Name):
        return False
    return any(
        isinstance(each, ast.Assign)
        and each.value is not node
        and any(isinstance(to, ast.Name) and to.id == target.id for to in each.targets)
        for each in ast.walk(loop)
    )


def _members(node: ast.expr, frame: FrameType) -> list[tuple[str, Any]]:
    """The named members of a list, a dict's values, or what a comprehension runs over."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return [(_name(item, frame), _value(_inner(item, frame), frame)) for item in node.elts]
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return _members(node.generators[0].iter, frame)
    if isinstance(node, ast.Call):
        inner = node.func
        if isinstance(inner, ast.Attribute) and inner.attr in ("values", "items"):
            return _members(inner.value, frame)
        if isinstance(inner, ast.Name) and inner.id in ("list", "tuple", "enumerate"):
            return _members(node.args[0], frame) if node.args else []
        return []
    value = _value(node, frame)
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items() if isinstance(item, Tensor)]
    if isinstance(value, (list, tuple)):
        return [(f"{ast.unparse(node)}[{number}]", item) for number, item in enumerate(value)]
    return []


def _leaves(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return [*_leaves(node.left), *_leaves(node.right)]
    return [node]


def _inner(node: ast.expr, frame: FrameType | None) -> ast.expr:
    """What is weighted, in `0.5 * term` and `term / n`."""
    if isinstance(node, ast.UnaryOp):
        return _inner(node.operand, frame)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
        if isinstance(_value(node.right, frame), (int, float)):
            return _inner(node.left, frame)
        if isinstance(node.op, ast.Mult) and isinstance(_value(node.left, frame), (int, float)):
            return _inner(node.right, frame)
    return node


def _value(node: ast.expr, frame: FrameType | None) -> Any:
    """The value of a name, an attribute or an item, as it is now; None for what must be run."""
    if isinstance(node, ast.Constant):
        return node.value
    if frame is None:
        return None
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        return getattr(owner, "__dict__", {}).get(node.attr)
    if isinstance(node, ast.Subscript):
        owner, key = _value(node.value, frame), _value(node.slice, frame)
        if type(owner) in (dict, list, tuple) and isinstance(key, (str, int)):
            return owner[key] if type(owner) is not dict else owner.get(key)
    return None


def _name(node: ast.expr, frame: FrameType | None = None) -> str:
    """The name of a term without its weight; without a frame, where that is a plain number."""
    inner = _inner(node, frame)
    if isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant):
        key = inner.slice.value
        if isinstance(key, str):
            return key
    text = ast.unparse(inner)
    return text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 3] + "..."


def _flag(value: Any) -> str | None:
    if not isinstance(value, Tensor):
        return "" if isinstance(value, (int, float)) else None
    return classify(value).value if is_bad(value) else ""


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user or of a package; None where a backward pass comes before."""
    while frame is not None:
        kind = kind_of(frame.f_code)
        if kind == USER:
            return frame
        if kind == ENGINE:
            return None
        frame = frame.f_back
    return None


def node_at(place: Place) -> Node | None:
    """The sum or call in the user's file that runs at this place."""
    line, end_line, start, end = positions(place)
    if start is None or end is None:
        return None
    return _nodes(place.code.co_filename).get((line, end_line, start, end))


def _loop_around(node: Node, frame: FrameType) -> ast.For | None:
    """The innermost `for` whose body holds the node."""
    loops = [
        each
        for each in _nodes(frame.f_code.co_filename).values()
        if isinstance(each, ast.For) and each.lineno < node.lineno <= (each.end_lineno or 0)
    ]
    return max(loops, key=lambda loop: loop.lineno, default=None)


@functools.lru_cache(maxsize=16)
def _nodes(filename: str) -> dict[tuple[int, int, int, int], Node]:
    """The sums, calls and loops of a file by their position; of several the outermost."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[tuple[int, int, int, int], Node] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.AugAssign, ast.Call, ast.For)):
            key = node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0
            found.setdefault(key, node)
    return found


_SUM_NODES = ("Add", "Sub", "Stack", "Cat")
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
    walk.visit(*edges[0], "")
    if walk.place is None or len(walk.terms) < 2:
        return None
    terms = _with_names(walk.terms, walk.place)
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

    def visit(self, node: Any, output: int, name: str) -> None:
        kind = node_name(node.name())
        after = [(number, each) for number, each in enumerate(node.next_functions) if each[0]]
        site = self._sites.get(node) if kind in _SUM_NODES else None
        place = site.place if site is not None else None
        if place is not None and self.place is not None:
            is_same = place.code is self.place.code and place.line == self.place.line
            place = place if is_same else None  # it belongs to another statement than the first
        if place is not None and len(after) > 1:
            self.place = self.place or place
            names = _names_at(place, len(node.next_functions))
            for number, (following, its_output) in after:
                self.visit(following, its_output, names[number])
        elif len(after) == 1 and (kind in _AROUND or place is not None):
            _, (following, its_output) = after[0]
            self.visit(following, its_output, name)
        else:
            self.terms.append(LossTerm(node, output, name))


def _names_at(place: Place, count: int) -> list[str]:
    node = node_at(place)
    sides = _sides(node)
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.List):
        sides = node.args[0].elts
    return [_name(side) for side in sides] if len(sides) == count else [""] * count


def _with_names(terms: list[LossTerm], place: Place) -> tuple[LossTerm, ...]:
    """With a number where a name is missing, or where several have the same one."""
    node = node_at(place)
    whole = ""
    if isinstance(node, ast.Call) and node.args:
        argument = node.args[0]
        if isinstance(argument, (ast.List, ast.Tuple)) and len(argument.elts) == len(terms):
            names = [_name(item) for item in argument.elts]
            return tuple(t._replace(name=n) for t, n in zip(terms, names, strict=True))
        whole = f" of {_name(argument)}"
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
            # Private: what the engine checks a given gradient against.
            made = term.node._input_metadata[term.output]
            ones = torch.ones(made.shape, dtype=made.dtype, device=made.device)
            return original((edge,), (ones,), *args, **kwargs)

        return run

    with wrap_engine(wrap):
        yield begun
