"""The loop around a running line: its body as a function, and what it carries from turn to turn.

Nothing here needs torch, and nothing runs the user's code but `Body.run`.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True, eq=False)
class Loop:
    """One `for` or `while` of a function or module; or a function that is called again and again.

    `carried` are the names that the body assigns and may read before: their values come from the
    turn before.
    """

    file: str
    node: ast.For | ast.While | _Function
    carried: frozenset[str]

    @property
    def is_function(self) -> bool:
        return isinstance(self.node, _Function)

    @property
    def line(self) -> int:
        return self.node.lineno

    @functools.cached_property
    def given(self) -> frozenset[str]:
        """The variables that have a value when a turn begins: those of `for`, or arguments."""
        node = self.node
        if isinstance(node, ast.For):
            names = (each.id for each in ast.walk(node.target) if isinstance(each, ast.Name))
            return frozenset(names)
        if isinstance(node, ast.While):
            return frozenset()
        one = node.args
        named = [*one.posonlyargs, *one.args, *one.kwonlyargs, one.vararg, one.kwarg]
        return frozenset(each.arg for each in named if each is not None)

    @functools.cached_property
    def noted(self) -> frozenset[str]:
        """The variables whose values are noted: carried ones, and iterators that it moves on."""
        nodes = [node for each in self.node.body for node in ast.walk(each)]
        nexts = [
            n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "next"
        ]
        names = [n for call in nexts for n in call.args[:1] if isinstance(n, ast.Name)]
        return self.carried | {name.id for name in names}

    @functools.cached_property
    def recurrent(self) -> frozenset[str]:
        """Those of the carried ones whose new values are computed from their old ones."""
        return self.carried & recurrent_in(self.node.body) - self.given

    @functools.cached_property
    def has_loops(self) -> bool:
        """Whether there is another loop in its body."""
        return any(map(self.repeats, range(len(self.node.body))))

    def statement(self, line: int) -> int:
        """The number of the statement of the body that is running at this line; -1: the header."""
        body = self.node.body
        if line < body[0].lineno:
            return -1
        return max(number for number, each in enumerate(body) if each.lineno <= line)

    def is_left_at(self, line: int) -> bool:
        """Whether the loop ends at this line of its own accord, and not by an error."""
        leaves = (ast.Break, ast.Return)
        ends = [n for n in _walk_scope(self.node) if isinstance(n, leaves) and n.lineno == line]
        return bool(ends) or self.statement(line) < 0

    def assigned_between(self, first: int, line: int | None) -> set[str]:
        """The variables that the body may have assigned on its way from the one line to the other.

        What the statement at `line` assigns is not assigned yet; None is the end of the body.
        """
        stores = _stores(self.node.body, line)
        names = (node for node in stores if isinstance(node, ast.Name) and node.lineno >= first)
        return {node.id for node in names}

    def attributes_until(self, line: int) -> set[str]:
        """The attributes, of whatever object, that the body may have assigned up to this line."""
        return {n.attr for n in _stores(self.node.body, line) if isinstance(n, ast.Attribute)}

    def line_after(self, line: int) -> int | None:
        """Where the statement of the body begins that follows the one at this line."""
        following = self.node.body[self.statement(line) + 1 :]
        return following[0].lineno if following else None

    def repeats(self, number: int) -> bool:
        """Whether that statement has a loop inside, so that it may pass a place several times."""
        return number >= 0 and any(map(_is_loop, _walk_scope(self.node.body[number])))


_RANK = re.compile("rank|main_?process|master|is_main|chief")


# What a rank may do alone in a replay: it is shown to nobody, and goes nowhere.
_QUIET = frozenset(
    ["print", "save", "log", "info", "debug", "warning", "write", "append", "update", "item"]
    + ["add_scalar", "set_description", "set_postfix", "state_dict", "format", "join", "len"]
    + ["float", "int", "str", "round", "time", "perf_counter", "makedirs", "mkdir", "is_main"]
    + ["get_rank", "get_world_size", "is_main_process", "detach", "cpu", "mean", "sum"]
)


def asks_for_rank(loop: Loop, *, until: int | None) -> bool:
    """Whether some ranks do something by themselves before this line, as far as names tell.

    What is printed, logged or saved does not count.
    """
    branches = [
        node
        for node in _walk_scope(loop.node)
        if isinstance(node, (ast.If, ast.IfExp))
        and (until is None or node.lineno <= until)
        and _RANK.search(ast.unparse(node.test).lower())
    ]
    calls = [n.func for b in branches for n in ast.walk(b) if isinstance(n, ast.Call)]
    names = [getattr(call, "attr", getattr(call, "id", "")) for call in calls]
    return not _QUIET.issuperset(names)


def loops_around(code: CodeType, line: int) -> tuple[Loop, ...]:
    """The loops of this very function or module around the line, innermost first.

    A line in a loop's header counts as inside it.
    """
    return _loops_around(code.co_filename, code.co_name, code.co_firstlineno, line)


@functools.lru_cache(maxsize=1 << 12)
def _loops_around(file: str, name: str, first: int, line: int) -> tuple[Loop, ...]:
    scope = _scope(file, name, first)
    if scope is None:
        return ()
    around = [n for n in _walk_scope(scope) if _is_loop(n) and n.lineno <= line <= _end(n)]
    return tuple(_loop(file, node) for node in sorted(around, key=lambda n: -n.lineno))


@functools.lru_cache(maxsize=1 << 8)
def _loop(file: str, node: ast.For | ast.While | _Function) -> Loop:
    return Loop(file, node, carried_by(node.body))


def function_around(code: CodeType) -> Loop | None:
    """The function itself, whose caller may be a comprehension or somebody else's loop."""
    scope = _scope(code.co_filename, code.co_name, code.co_firstlineno)
    return _loop(code.co_filename, scope) if isinstance(scope, _Function) else None


@functools.lru_cache(maxsize=1 << 8)
def is_forwarding(code: CodeType) -> bool:
    """Whether a generator only hands on what its own `for` loops take, and nothing ahead of it.

    One such as `for batch in loader: yield batch` stands where it stood when it is asked for the
    same batch again.
    """
    scope = _scope(code.co_filename, code.co_name, code.co_firstlineno)
    if not isinstance(scope, _Function):
        return False
    nodes = list(_walk_scope(scope))
    takes = any(isinstance(n, ast.Call) and getattr(n.func, "id", "") == "next" for n in nodes)
    yields = [n for n in nodes if isinstance(n, ast.Yield)]
    fresh = [n for loop in nodes if isinstance(loop, ast.For) for n in _yields_of(loop)]
    return not takes and all(each in fresh for each in yields)


def _yields_of(loop: ast.For) -> Iterator[ast.Yield]:
    """The yields in a loop that give what the loop has just taken."""
    taken = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    for node in _walk_scope(loop):
        if isinstance(node, ast.Yield) and node.value is not None:
            names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            if names & taken:
                yield node


def _stores(body: Iterable[ast.stmt], line: int | None) -> Iterator[Any]:
    """What the statements have assigned when they stand at this line, as nodes."""
    for statement in body:
        if line is not None and statement.lineno > line:
            break
        is_under_way = line is not None and line <= _last(statement)
        parts = list(ast.iter_child_nodes(statement))
        handlers = [each for each in parts if isinstance(each, (ast.ExceptHandler, ast.match_case))]
        inner = [each for each in parts if isinstance(each, ast.stmt)]
        inner += [each for handler in handlers for each in handler.body]
        if inner:
            repeats = is_under_way and isinstance(statement, (ast.For, ast.While))
            yield from _stores(inner, None if repeats else line)  # what its turns before did, too
        elif is_under_way:
            continue
        own = [each for each in parts if each not in inner and each not in handlers]
        for node in itertools.chain(*map(_walk_scope, own)):
            if isinstance(getattr(node, "ctx", None), ast.Store):
                yield node


def attributes_assigned(code: CodeType, *, after: int = 0, until: int | None = None) -> set[str]:
    """The attributes that a function assigns, of whatever object, between these lines of it."""
    scope = _scope(code.co_filename, code.co_name, code.co_firstlineno)
    stores = () if scope is None else _stores(scope.body, until)
    found = (node for node in stores if isinstance(node, ast.Attribute) and node.lineno > after)
    return {node.attr for node in found}


def yields_at(code: CodeType, line: int) -> list[ast.Yield]:
    """The yields of a generator's function that stand on this line."""
    scope = _scope(code.co_filename, code.co_name, code.co_firstlineno)
    nodes = () if scope is None else _walk_scope(scope)
    return [n for n in nodes if isinstance(n, ast.Yield) and n.lineno <= line <= _last(n)]


def question_at(code: CodeType, line: int) -> ast.expr | None:
    """What an `assert` on this line asserts, or the nearest `if` around it asks; None without."""
    scope = _scope(code.co_filename, code.co_name, code.co_firstlineno)
    nodes = () if scope is None else _walk_scope(scope)
    asked = [n for n in nodes if isinstance(n, (ast.Assert, ast.If)) and _is_within(n, line)]
    return max(asked, key=lambda node: node.lineno).test if asked else None


def _is_within(node: ast.Assert | ast.If, line: int) -> bool:
    if isinstance(node, ast.Assert):
        return node.lineno <= line <= _last(node)
    return node.body[0].lineno <= line <= _last(node.body[-1])


def _last(node: ast.expr | ast.stmt) -> int:
    return node.lineno if node.end_lineno is None else node.end_lineno


def assigned_in(statements: Iterable[ast.stmt]) -> set[str]:
    """The names that the statements assign, functions that they define among them."""
    nodes = [node for each in statements for node in _walk_scope(each)]
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names | {each.name for each in statements if isinstance(each, _SCOPES[:2])}


@functools.lru_cache(maxsize=1 << 6)
def _tree(file: str) -> ast.Module | None:
    text = "".join(linecache.getlines(file))
    try:
        return ast.parse(text) if text else None
    except (SyntaxError, ValueError, RecursionError):
        return None


def _scope(file: str, name: str, first: int) -> ast.Module | _Function | None:
    tree = _tree(file)
    if tree is None or name == "<module>":
        return tree
    for node in ast.walk(tree):
        if not isinstance(node, _Function) or node.name != name:
            continue
        if first == min([node.lineno, *(each.lineno for each in node.decorator_list)]):
            return node
    return None


def _is_loop(node: ast.AST) -> bool:
    return isinstance(node, (ast.For, ast.While))


def _end(node: Any) -> int:
    """The last line of a loop's body; what stands under its `else` is not repeated."""
    return int(node.body[-1].end_lineno)


def _walk_scope(node: ast.AST) -> Iterator[Any]:
    """The node and all in it, but not what is in functions and classes that it defines."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _SCOPES):
            continue
        yield from _walk_scope(child)


def recurrent_in(body: Iterable[ast.stmt]) -> frozenset[str]:
    """Names whose new values the body computes from their old ones, by whatever way.

    A batch that is fetched ahead is carried to the next turn, and is none of them.
    """
    sources: dict[str, set[str]] = {}
    for node in (node for each in body for node in _walk_scope(each)):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            read = _read_in(node) | (names if isinstance(node, ast.AugAssign) else set())
            for name in names:
                sources.setdefault(name, set()).update(read)
    return frozenset(name for name in sources if name in _reached(sources, name))


def _read_in(node: ast.AST) -> set[str]:
    """The names that are read."""
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return {each.id for each in names if isinstance(each.ctx, ast.Load)}


def _reached(sources: dict[str, set[str]], name: str) -> set[str]:
    """What the name is computed from, directly or by other names."""
    found: set[str] = set()
    todo = list(sources[name])
    while todo:
        if (each := todo.pop()) not in found:
            found.add(each)
            todo += sources.get(each, ())
    return found


def carried_by(body: Iterable[ast.stmt]) -> frozenset[str]:
    """Names that the statements may read before they have surely assigned them."""
    reader = _Reader()
    for statement in body:
        reader.visit(statement)
    return frozenset(reader.early & reader.stored)


class _Reader(ast.NodeVisitor):
    """Follows the statements; what only some ways assign is not sure to be assigned."""

    def __init__(self) -> None:
        self.sure: set[str] = set()
        self.early: set[str] = set()
        self.stored: set[str] = set()

    def _use(self, name: str, context: ast.expr_context) -> None:
        if isinstance(context, ast.Store):
            self.sure.add(name)
            self.stored.add(name)
        elif name not in self.sure:
            self.early.add(name)

    def visit_Name(self, node: ast.Name) -> None:
        self._use(node.id, node.ctx)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        reading = copy.copy(node.target)
        reading.ctx = ast.Load()
        self.visit(reading)
        self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.visit(node.target)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._visit_ways(node.body, node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._visit_ways([*node.body, *node.orelse], [])

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._visit_ways([ast.Expr(node.target), *node.body, *node.orelse], [])

    def visit_Try(self, node: ast.Try) -> None:
        handled = [each for handler in node.handlers for each in handler.body]
        self._visit_ways([*node.body, *node.orelse], handled)
        for statement in node.finalbody:
            self.visit(statement)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.visit(item.optional_vars)
        for statement in node.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_inside(node.body)
        self._use(node.name, ast.Store())

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_inside([node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._use(node.name, ast.Store())

    def _visit_ways(self, one: Iterable[ast.AST], other: Iterable[ast.AST]) -> None:
        before = set(self.sure)
        ends = []
        for way in (one, other):
            self.sure = set(before)
            for statement in way:
                self.visit(statement)
            ends.append(self.sure)
        self.sure = ends[0] & ends[1]

    def _visit_inside(self, body: Iterable[ast.AST]) -> None:
        """Reads of a function's own are reads of ours, as far as its names are not its own."""
        inner = _Reader()
        inner.sure = set(self.sure)
        for statement in body:
            inner.visit(statement)
        self.early |= inner.early - inner.stored


def variables_of(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's variables; nothing else keeps their values alive for it.

    Until Python 3.13 the dict of a function's variables stays with the frame once it was asked
    for, and with it what the function has long let go of. It is emptied if nobody else has it: it
    is only a copy of what the function works with.
    """
    held = frame.f_locals
    values = dict(held)
    is_function = frame.f_code.co_flags & _OPTIMIZED
    if is_function and type(held) is dict and sys.getrefcount(held) <= _OURS_ALONE:
        held.clear()
    return values


_OPTIMIZED = 0x1  # the code of a function, whose variables are not in a dict
_OURS_ALONE = 3  # the frame, our variable, and the argument that counts


class CannotRunError(Exception):
    """The body cannot be run on its own."""


@dataclass(frozen=True)
class Body:
    """The statements of a loop's body up to the running one, as a function of the variables."""

    function: Callable[..., Any]
    code: CodeType
    space: Mapping[str, Any]
    assigned: frozenset[str]
    shared: frozenset[str]  # names of the module that it assigns

    def run(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run it with these values of some variables; the result is what they are at the end."""
        result = self.function({**self.space, **values})
        if hasattr(result, "send"):  # the body yields
            for _ in result:
                pass
        return result if isinstance(result, dict) else {}

    def changes(self, frame: FrameType | None) -> list[tuple[Any, Any]]:
        """Values of the variables that it has assigned, before it was run and now.

        `frame` is one inside it.
        """
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        if frame is None:
            return []
        now = {**variables_of(frame), **{n: frame.f_globals.get(n) for n in self.shared}}
        both = [n for n in self.assigned if n in now and n in self.space]
        return [(now[n], self.space[n]) for n in both if now[n] is not self.space[n]]


def body_of(frame: FrameType, loop: Loop, *, since: int = 0, until: int | None = None) -> Body:
    """The body of the loop in this frame, between the statements with these lines.

    At module level it works on the module's own names, which the caller puts back afterwards.
    CannotRunError if it cannot be run by itself.
    """
    nodes = loop.node.body[max(0, loop.statement(since)) :]
    statements = nodes if until is None else [each for each in nodes if each.lineno <= until]
    if not statements:
        raise CannotRunError("the loop has not reached its body")
    if any(isinstance(n, (ast.Await, ast.AsyncFor)) for s in statements for n in _walk_scope(s)):
        raise CannotRunError("the loop waits for others")
    copied = [_mangled(copy.deepcopy(each), frame.f_code) for each in statements]
    copied = _GivesVariables().visit(ast.Module(body=copied, type_ignores=[])).body
    stored = assigned_in(copied)
    is_module = not frame.f_code.co_flags & _OPTIMIZED
    values = variables_of(frame)
    shared = stored | {"__turn"} if is_module else _declared_global(frame.f_code)
    make = _compiled_for_module if is_module else _compiled_for_function
    function, code = make(frame, values, copied, sorted(shared))
    return Body(function, code, values, frozenset(stored), frozenset(shared))


_VARIABLES = "__import__('builtins').locals()"


class _GivesVariables(ast.NodeTransformer):
    """A body that returns gives its variables, whatever it would have given."""

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        value = [] if node.value is None else [ast.copy_location(ast.Expr(node.value), node)]
        return [*value, ast.copy_location(ast.Return(_variables()), node)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node  # its returns are its own

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node


def _variables() -> ast.expr:
    return ast.parse(_VARIABLES, mode="eval").body


def _declared_global(code: CodeType) -> set[str]:
    scope = _scope(code.co_filename, code.co_name, code.co_firstlineno)
    nodes = () if scope is None else _walk_scope(scope)
    return {name for node in nodes if isinstance(node, ast.Global) for name in node.names}


def _mangled(statement: ast.stmt, code: CodeType) -> ast.stmt:
    """With private names (`self.__x`) as the class around the method would have them."""
    above = code.co_qualname.replace(".<locals>", "").split(".")[:-1]
    for node in ast.walk(statement) if above else ():
        name = node.attr if isinstance(node, ast.Attribute) else ""
        if name.startswith("__") and not name.endswith("__"):
            node.attr = f"_{above[-1].lstrip('_')}{name}"  # type: ignore[attr-defined]
    return statement


def _once(body: list[ast.stmt]) -> list[ast.stmt]:
    """A loop of one turn, so that `break` and `continue` stay what they are; then the variables."""
    target, turns = ast.Name("__turn", ast.Store()), ast.Tuple([ast.Constant(0)], ast.Load())
    return [ast.For(target=target, iter=turns, body=body, orelse=[]), ast.Return(_variables())]


def _arguments(names: Iterable[str]) -> ast.arguments:
    args = [ast.arg(name) for name in names]
    return ast.arguments(
        posonlyargs=[], args=args, kwonlyargs=[], kw_defaults=[], defaults=[], vararg=None
    )


def _define(name: str, names: Iterable[str], body: list[ast.stmt]) -> Any:
    parts: dict[str, Any] = {"name": name, "args": _arguments(names), "body": body}
    parts |= {"decorator_list": [], "returns": None, "type_params": []}
    return ast.FunctionDef(**{key: parts[key] for key in ast.FunctionDef._fields if key in parts})


def _made(frame: FrameType, function: Any) -> Any:
    module = ast.fix_missing_locations(ast.Module(body=[function], type_ignores=[]))
    space: dict[str, Any] = {}
    flags = frame.f_code.co_flags & _FUTURE
    code = compile(module, frame.f_code.co_filename, "exec", flags=flags, dont_inherit=True)
    exec(code, frame.f_globals, space)
    return space[function.name]


def _name_like(function: Any, code: CodeType) -> None:
    """Reports name the function that an operation is in."""
    function.__code__ = function.__code__.replace(
        co_name=code.co_name, co_qualname=code.co_qualname
    )


_FUTURE = 0x1FF0000  # the compiler flags of `from __future__ import ...`


def _compiled_for_module(
    frame: FrameType, variables: Mapping[str, Any], body: list[ast.stmt], shared: list[str]
) -> tuple[Callable[..., Any], CodeType]:
    function = _made(frame, _define("__body__", [], [ast.Global(shared), *_once(body)]))
    _name_like(function, frame.f_code)

    def call(values: Mapping[str, Any]) -> Any:
        result = function()
        return dict(frame.f_globals) if isinstance(result, dict) else result

    return call, function.__code__


def _compiled_for_function(
    frame: FrameType, variables: Mapping[str, Any], body: list[ast.stmt], shared: list[str]
) -> tuple[Callable[..., Any], CodeType]:
    code = frame.f_code
    first = code.co_varnames[:1]  # `super()` asks for the first argument
    names = dict.fromkeys([*first, *variables])
    free = [n for n in names if n in variables and n.isidentifier() and n != "__class__"]
    declared: list[ast.stmt] = [ast.Global(shared)] if shared else []
    inner = _define("__body__", free, [*declared, *_once(body)])
    # It also looks for a cell of this name around the function.
    back = ast.Return(ast.Name("__body__", ast.Load()))
    make = _made(frame, _define("__around__", ["__class__"], [inner, back]))
    function = make(variables.get("__class__"))
    _name_like(function, code)

    def call(values: Mapping[str, Any]) -> Any:
        return function(*(values[name] for name in free))

    return call, function.__code__
